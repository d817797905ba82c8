"""Trainers of other libraries: a call for each, by which their training survives.

A module here loads its library, and is loaded only by whoever imports it by name.
"""
