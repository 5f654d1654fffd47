"""Kernels for CPUs with vectors of 512 bits: the bits of the portable ones, at the speed of memory.

`quantize.py` tells how they work together.
"""
