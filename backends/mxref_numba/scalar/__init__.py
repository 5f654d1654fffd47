"""Kernels in plain Numba, element by element, for any CPU; vectors take what is not worth a second copy from here."""
