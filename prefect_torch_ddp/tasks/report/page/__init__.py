"""What a run's page says, section by section, as markdown and SVG.

Pure functions of one value, `RunView`. Nothing here reads a storage, knows Prefect or waits.
"""
