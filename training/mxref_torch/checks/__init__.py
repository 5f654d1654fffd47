"""Checks of a run, and measurements of it, all of which only read."""
