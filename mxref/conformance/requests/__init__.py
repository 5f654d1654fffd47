"""Requests to a backend: quantizations, dequantizations and products, and their input values."""
