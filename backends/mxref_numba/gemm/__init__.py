"""Scaled products: `product.py` chooses the kernels; `portable.py` and `wide.py` are plain Numba, `vector.py` LLVM."""
