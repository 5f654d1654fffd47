"""The ablation laboratory: a ladder of recipes, each trained as one run, and the numbers that compare them."""
