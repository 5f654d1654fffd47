"""Scaled products: `product.py` chooses the kernels, `portable.py` and `wide.py` run on any CPU, `vector.py` on some."""
