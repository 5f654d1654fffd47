"""The errors that mxref raises on bad input. All are subclasses of MxrefError."""

from __future__ import annotations


class MxrefError(Exception):
    """Base of all errors raised on bad input. The message is one line that names the problem and the remedy."""


class ShapeError(MxrefError, ValueError):
    """A shape, axis, origin or padding that the operation does not support."""


class DtypeError(MxrefError, TypeError):
    """A data type that the operation does not accept, because converting it would lose or guess bits."""


class NonfiniteError(MxrefError, ValueError):
    """NaN or Inf where the policy `nonfinite = "raise"` forbids it."""


class RecipeError(MxrefError, ValueError):
    """An unknown key or an invalid value of a recipe, spec or configuration."""


class FileFormatError(MxrefError, ValueError):
    """A file that is missing, damaged or of another format."""


class BackendError(MxrefError, LookupError):
    """A backend that is unknown, not installed, or does not follow the protocol."""


class LoadError(BackendError):
    """A backend whose code raised an exception, or tried to end the program, while it was loaded."""


class SettingError(MxrefError, ValueError):
    """An environment variable with a value that is unknown or cannot be used here."""


class UnsupportedError(MxrefError, NotImplementedError):
    """A request that the backend does not declare in its capabilities. There is no fallback."""


class ConformanceError(MxrefError, AssertionError):
    """An answer that differs from the reference's. `require` shows it in several lines."""
