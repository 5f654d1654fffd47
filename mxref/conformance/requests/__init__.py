"""What can be asked of a backend: quantizations, dequantizations and products, and the values they are made of."""
