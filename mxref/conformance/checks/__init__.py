"""One module for each family of clauses; its function `checks` yields the family's checks for a plan."""
