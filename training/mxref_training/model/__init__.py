"""The models that are trained."""
