"""Scaled products: `product.py` chooses the kernels, `portable.py` runs on any CPU, `avx512.py` needs VNNI."""
