"""The questions: a module for each family of clauses, whose `checks` yields its checks for a plan."""
