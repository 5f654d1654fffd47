"""The version number, which every module may read: the package's own `__init__` imports the others."""

__version__ = "0.1.0"
