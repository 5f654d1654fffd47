"""What operators are given by name or number: backends, treatments, random streams, places and censuses."""

from __future__ import annotations

import itertools
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

import torch

from mxref.backend import Backend
from mxref.errors import BackendError, RecipeError, ShapeError, UnsupportedError
from mxref.formats import BlockFormat, OperandFormat
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.roles import GemmRole
from mxref.tomlio import build, nearest, to_table

Gemm = tuple[GemmRole, OperandFormat, OperandFormat]
"""What the census tells GEMMs apart by: role, and the formats of its two operands."""

Census = Counter[Gemm]
"""How often each GEMM ran."""


class LayerCensus(Counter[Gemm]):
    """The census of one layer, whose GEMMs are counted into that of its model too."""

    whole: Census | None = None
    """The census of the model."""
    ran: bool = False
    """Whether any GEMM of the layer ever ran."""
    trained: bool = False
    """Whether a GEMM of the backward pass ran since the last optimizer step."""
    listener: Callable[[GemmRole, int], None] | None = None
    """Is told the role and the tokens of each GEMM that ran."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy or a pickle is made of, without the listener; `Counter` leaves all attributes out."""
        return type(self), (dict(self),), vars(self) | {"listener": None}


_backends: dict[str, Backend] = {}
_tallies: weakref.WeakValueDictionary[int, Census] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def operator(function: Callable[..., Any], changes: str = "") -> torch._ops.OpOverload:
    """Return a function as the operator `mxref::<its name>`: no result shares memory, no other argument is changed.

    `changes` names the argument that is, if one is; it has to be the first.

    `torch.library.custom_op` makes the same, and adds three times as much to a call: it looks at each result for
    shared memory, and has an autograd formula to raise an error. Here tests look, and the operator itself refuses
    what would need its gradient.
    """

    @cache
    def untraced() -> Callable[..., Any]:
        # Importing the compiler takes seconds.
        found: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return found

    def kernel(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in arguments):
            raise UnsupportedError(
                f"mxref::{name} has no gradient, and an argument requires one; the layers of mxref_torch "
                "have all three GEMMs: use these, or call it within torch.no_grad()"
            )
        if changes:
            # What autograd has saved of it is no longer what it was.
            torch.autograd.graph.increment_version(arguments[0])
        return untraced()(*arguments)

    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args={changes} if changes else ())
    torch.library.define(f"mxref::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"mxref::{name}", "CompositeExplicitAutograd", kernel)
    overload: torch._ops.OpOverload = getattr(torch.ops.mxref, name).default
    overload.__doc__ = function.__doc__
    return overload


def fake(of: torch._ops.OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of the function that gives an operator's results without values, as compilers ask for."""
    decorator: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(of)
    return decorator


def register_backend(backend: Backend) -> str:
    """Return the key by which operators find the backend: its name, numbered if another one has it."""
    for number in itertools.count(1):
        key = backend.name if number == 1 else f"{backend.name}#{number}"
        if _backends.setdefault(key, backend) is backend:
            return key
    raise AssertionError("unreachable: the count does not end")


def backend_of(key: str) -> Backend:
    """Return the backend of a key; BackendError if there is none."""
    if key not in _backends:
        raise BackendError(
            f"backend {key!r} is not registered{nearest(key, _backends)}; see register_backend"
        )
    return _backends[key]


def register_census(census: Census) -> int:
    """Return the handle under which GEMM operators count into `census`, for as long as it lives."""
    handle = next(_handles)
    _tallies[handle] = census
    return handle


def count(tally: int, role: str, a: OperandFormat, b: OperandFormat, tokens: int) -> None:
    """Count a GEMM that ran into the census of a handle; 0, or one that no longer lives, counts nowhere.

    Args:
        tally: from `register_census`.
        role: the linear layer's GEMM.
        a: format of the first operand.
        b: format of the second.
        tokens: rows of the activations or gradients that it read.
    """
    census = _tallies.get(tally)
    if census is None:
        return
    gemm = GemmRole(role), a, b
    census[gemm] += 1
    if isinstance(census, LayerCensus):
        census.ran = True
        census.trained |= gemm[0] is not GemmRole.FPROP
        if census.whole is not None:
            census.whole[gemm] += 1
        if census.listener is not None:
            census.listener(gemm[0], tokens)


def formats_text(a: OperandFormat, b: OperandFormat) -> str:
    """Return the formats of a GEMM's two operands as texts write them: one name if they have the same."""
    return a.name if a is b else f"{a.name} x {b.name}"


def gemm_text(gemm: Gemm) -> str:
    """Return what the census counts as texts write it, as in `fprop in mxfp4`."""
    role, a, b = gemm
    return f"{role.value} in {formats_text(a, b)}"


def in_order(gemms: Iterable[Gemm]) -> list[Gemm]:
    """Return GEMMs by role, then by the names of their formats."""
    roles = list(GemmRole)
    return sorted(set(gemms), key=lambda gemm: (roles.index(gemm[0]), gemm[1].name, gemm[2].name))


def spec_text(spec: OperandSpec) -> str:
    """Return a spec as the compact JSON that operators take."""
    return json.dumps(to_table(spec), sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=256)
def parse_spec(text: str) -> OperandSpec:
    """Return the spec of `spec_text`; RecipeError on a key or value that does not exist."""
    return build(OperandSpec, json.loads(text), "operand spec")


def block_format(spec: OperandSpec) -> BlockFormat:
    """Return the block format of a spec; RecipeError if it has no blocks."""
    if not isinstance(spec.format, BlockFormat):
        raise RecipeError(f"an operator takes block formats, and {spec.format} has no blocks")
    return spec.format


def stream_words(seed: int, layer: int, operand: int) -> list[int]:
    """Return a random stream without its step; the seed is split in two because operators take signed integers."""
    return [seed & 0xFFFFFFFF, seed >> 32, layer, operand]


WHOLE = (0, 0, -1, -1)
"""`region_words` of a matrix that is no part of a larger one."""


def region_words(placement: Placement) -> list[int]:
    """Return where a matrix lies as operators take it: row, column, global rows, global columns.

    A global length of -1 is that of the matrix itself. A step's tokens are not in it: they come by `step_place`.

    Raises:
        ShapeError: not two axes.
    """
    origin, shape = placement.origin or WHOLE[:2], placement.global_shape or WHOLE[2:]
    if len(origin) != 2 or len(shape) != 2:
        raise ShapeError(f"a matrix has two axes, got origin {origin} and global shape {shape}")
    return [*origin, *shape]


def step_place(step: int, token_origin: int = 0, global_tokens: int | None = None) -> torch.Tensor:
    """Return where a micro-batch lies in training as int64 [3]: step, first token, tokens of the step or -1.

    It travels as a tensor because `torch.compile` would compile anew for every step given as an integer.
    """
    return torch.tensor([step, token_origin, -1 if global_tokens is None else global_tokens])
