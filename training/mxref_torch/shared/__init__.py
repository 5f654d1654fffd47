"""What the layers of a model share: the recipes of the steps, and the place in training."""
