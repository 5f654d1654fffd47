"""Scaled matrix products: `ordered`, `bounded`, and the ways that each target multiplies."""
