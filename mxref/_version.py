"""The version numbers, which every module may read: the package's own `__init__` imports the others."""

__version__ = "0.1.0"

SPECIFICATION = "1.0.0"
"""The version of the clauses. `spec/index.rst` says what a new version may change."""
