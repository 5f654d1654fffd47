"""One module for each family of clauses; its function `checks` yields the family's checks for a plan.

A check draws its values from the plan's seed alone: every process makes the same checks in the same order, and sends
only their numbers. The draws of a family come from one generator, so a new check that draws goes to its end, or has a
generator of its own: the values of the others stay.
"""
