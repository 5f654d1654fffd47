"""Kernels in vectors of 512 or 256 bits: the bits of the portable ones, at the speed of memory.

`quantize.py` tells how they work together.
"""
