"""Errors of the training package, all of them `mxref.errors.MxrefError`."""

from __future__ import annotations

from mxref.errors import MxrefError


class DataError(MxrefError, ValueError):
    """A corpus, tokenizer or loader state that is missing, damaged, or does not fit the run."""


class CheckpointError(MxrefError, OSError):
    """A checkpoint that cannot be written, is damaged, or belongs to another model or run."""


class ConfigError(MxrefError, ValueError):
    """A training configuration whose key or value does not exist, or does not fit the others."""


class HuggingFaceError(MxrefError, ValueError):
    """A folder in Hugging Face's layout that cannot be read or written, or does not fit the model."""


class DivergedError(MxrefError, ArithmeticError):
    """A loss or gradient that is not finite, or a loss that a stated rule calls diverged."""


class AgreedStop(MxrefError):
    """A stop that all ranks of a run have agreed on and raise together."""


class RunError(MxrefError, RuntimeError):
    """A run that an unexpected exception stopped, most often one of its backend; the cause is chained."""


class PeerStopped(MxrefError):
    """Another rank has failed and shows its error; this rank stops without one."""


def start_over(folder: object) -> str:
    """Return the advice for a damaged run; it is right for a single run and for an arm of a ladder."""
    return f"start over: mxref train with --no-resume, or delete {folder}"
