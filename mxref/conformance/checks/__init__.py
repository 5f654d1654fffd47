"""One module for each family of clauses; its function `checks` yields the family's checks for a plan.

A check draws its values from the plan's seed alone: every process makes the same checks in the same order, and sends
only their numbers.
"""
