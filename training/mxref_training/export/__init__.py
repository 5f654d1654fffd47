"""A run's model as a Hugging Face folder: full weights, or packed ones that inference engines load."""
