"""The ablation laboratory: a ladder of recipes, each trained as one run, and the report that compares them."""
