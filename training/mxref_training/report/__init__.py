"""The reports of runs, ladders and probes: pages, figures and tables, all read from the files that these wrote."""
