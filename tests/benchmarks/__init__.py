"""The measurements: ratios against a reference in the same run, interleaved, medians.

`make bench` runs them.
"""
