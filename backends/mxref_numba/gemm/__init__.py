"""Scaled products: `profiles.py` chooses the kernels, `plain_tiles.py` for any CPU, `packed_tiles.py` for vectors."""
