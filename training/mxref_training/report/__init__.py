"""The report of one run, or of several side by side: pages, figures and tables, all read from the runs' own files."""
