"""The report of a probe."""
