"""What the layers of a model share: the recipes of the steps, the place in training, and operands of a common X."""
