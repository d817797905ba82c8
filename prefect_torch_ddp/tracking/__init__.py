"""What a run leaves for later, and how it is found again: records, events, `latest` and `best`.

Callers describe a run, and report its events and its end. Nothing here starts a gang or waits for
one, and nothing here draws what a person sees (`tasks/report/`).
"""
