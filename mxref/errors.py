"""Every error that mxref raises on bad input, so that a caller can catch them all or one kind."""

from __future__ import annotations


class MxrefError(Exception):
    """Base of all errors raised on bad input; its message is one line that names the way out."""


class ShapeError(MxrefError, ValueError):
    """A shape, axis, origin or padding that the operation cannot take."""


class DtypeError(MxrefError, TypeError):
    """A data type that would have to be narrowed or guessed."""


class NonfiniteError(MxrefError, ValueError):
    """NaN or Inf where the policy `nonfinite = "raise"` forbids it."""


class RecipeError(MxrefError, ValueError):
    """A recipe, spec or configuration key or value that does not exist or does not fit."""


class FileFormatError(MxrefError, ValueError):
    """A file that is missing, damaged, or not of the format that its reader expects."""


class BackendError(MxrefError, LookupError):
    """A backend that is unknown, not installed, or does not follow the protocol."""


class LoadError(BackendError):
    """A backend whose own code failed, or would have ended the program, while it was loaded."""


class UnsupportedError(MxrefError, NotImplementedError):
    """A request outside the capabilities that a backend declares; nothing falls back silently."""
