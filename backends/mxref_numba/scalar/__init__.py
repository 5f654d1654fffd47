"""Kernels in plain Numba, element by element, for any CPU; what they share with the other rooms is here too."""
