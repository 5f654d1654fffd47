"""The report of one run, or of several side by side."""
