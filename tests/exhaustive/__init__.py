"""Complete sweeps of the reference and of the Numba backend against the exact oracle's thresholds.

`python -m exhaustive`, with `tests` on the path, runs them all. `test_exhaustive.py` runs slices of the same code, and
`test_exhaustive_faults.py` shows that every kind of sweep notices a planted fault.
"""
