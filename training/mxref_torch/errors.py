"""Errors of the linear layers, all of them `mxref.errors.MxrefError`."""

from __future__ import annotations

from mxref.errors import ConformanceError, MxrefError


class LayerError(MxrefError, ValueError):
    """A model or a layer that does not fit its recipe, or did not compute what the recipe asks for."""


class StepError(MxrefError, RuntimeError):
    """A training step that would draw the random bits of an earlier step again."""


class ShadowError(ConformanceError):
    """An answer of the backend during training that differs from the reference's."""
