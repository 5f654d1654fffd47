"""The reports of runs and of ladders: pages, figures and tables, all read from files that runs and ladders wrote."""
