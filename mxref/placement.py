"""Where an array lies: its random stream, its place in the global logical tensor, and what it must know of that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import index
from typing import Any

from mxref.arrays import described
from mxref.errors import RecipeError, ShapeError
from mxref.steps.random import Stream


@dataclass(frozen=True)
class Placement:
    """Which random stream an array draws from, and which part of the global logical tensor it is.

    Random bits are counted in the global tensor, so a part draws the same bits as the whole does at its place.
    RecipeError for a stream or a step that is none, ShapeError for an origin or shape that does not hold integers.

    Implements: quantize.parts
    """

    stream: Stream | None = None
    """Needed for SR and for random signs."""
    origin: tuple[int, ...] | None = None
    """Where the array begins in the global tensor, in the array's axis order; None is all zeros."""
    global_shape: tuple[int, ...] | None = None
    """Shape of the global tensor; None is the array's own."""
    step: Any = field(default=None, compare=False)
    """int64 [1] on the device of the array, read when the kernels run; it takes the place of the stream's step.

    None takes the stream's own. A backend has to declare `device_steps` for it. Placements compare without it."""
    amax: Any = field(default=None, compare=False)
    """float32 [1] on the device of the array: the largest finite magnitude of the global tensor after its transform.

    The scale of the tensor follows from it, where the format has one; a part of a tensor needs it. None takes the
    array's own. Placements compare without it."""

    def __post_init__(self) -> None:
        if self.stream is not None and not isinstance(self.stream, Stream):
            raise RecipeError(
                f"placement: stream must be a Stream, got {described(self.stream)}; "
                "make one, as in mxref.Stream(seed=1, step=0)"
            )
        for name in ("origin", "global_shape"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, integers(name, value))
        if self.step is not None:
            self._check_step()
        if self.amax is not None:
            kind = str(getattr(self.amax, "dtype", "")).rpartition(".")[2]
            if kind != "float32" or tuple(self.amax.shape) != (1,):
                raise RecipeError(
                    f"placement: amax must be a float32 array [1] on the device, not {described(self.amax)}; make one, "
                    "as in numpy.array([6.5], numpy.float32)"
                )

    def _check_step(self) -> None:
        """Raise RecipeError unless `step` is int64 [1] and there is a stream whose step it replaces."""
        kind = str(getattr(self.step, "dtype", "")).rpartition(".")[2]
        if kind != "int64" or tuple(self.step.shape) != (1,):
            raise RecipeError(
                f"placement: step must be an int64 array [1] on the device, not {described(self.step)}; make one, as "
                "in torch.zeros(1, dtype=torch.int64, device='cuda'), or give the number to the Stream"
            )
        if self.stream is None:
            raise RecipeError(
                "placement: step takes the place of a stream's step, and there is no stream; pass "
                "stream=Stream(seed, layer=layer, operand=operand)"
            )


def integers(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Return a tuple of Python's integers; ShapeError for anything else.

    NumPy's integers are converted because plans are cached, and a cached plan serves every later caller.
    """
    try:
        return tuple(index(value) for value in values)
    except TypeError:
        raise ShapeError(f"{name} must hold integers, one for each axis, got {values!r}") from None
