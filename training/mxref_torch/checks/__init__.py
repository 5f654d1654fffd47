"""Checks and measurements of a run. None of them changes a bit of it."""
