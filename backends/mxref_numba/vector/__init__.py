"""Kernels in vectors of 512 or 256 bits: the bits of the plain ones, at the speed of memory.

`units.py` tells how they work together.
"""
