"""The operations of a backend as torch operators, so that `torch.compile` sees no graph break.

Operators take tensors, integers and strings alone: a backend travels by its name in a table, the
treatment of an operand as compact JSON. This module has these tables; `blocks` and `dense` have the operators.
An operator's overload is named by a digest of the sources, as in `mxref::quantize.code_1f2e3d4c`: PyTorch keeps
compiled graphs on disk under what they call, and a graph holds defaults and shapes of the code that it called.

GEMMs are counted where they run, and not where they are asked for: a compiled graph that drops or replaces one cannot
hide it from the census. A compiler merges calls with equal arguments, so these must say all that a result depends on.

Watchers are called after each operator of a block format: a shadow or a recording. Usually there is none. They are a
list of the process: autograd runs the backward pass of a GPU in a thread of its own.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import library

from mxref.backend import Backend
from mxref.discovery import ENTRY_POINT_GROUP
from mxref.errors import UnsupportedError
from mxref.formats import BlockFormat, OperandFormat
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile, OperandSpec
from mxref.roles import GemmRole
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.tomlio import build, to_table

Gemm = tuple[GemmRole, OperandFormat, OperandFormat]
"""The key of the census: a GEMM's role and the formats of its two operands."""

Census = Counter[Gemm]
"""How often each GEMM ran."""


class LayerCensus(Counter[Gemm]):
    """The census of one layer."""

    name: str = ""
    """The layer's name in its model, for messages."""
    ran: bool = False
    """Whether any GEMM of the layer ever ran."""
    trained: bool = False
    """Whether a GEMM of the backward pass ran since the last optimizer step."""
    listener: Callable[[GemmRole | None, int], None] | None = None
    """
    Is told the role and the tokens of each GEMM of training that ran, those of a recomputation too. It is called with
    None when a forward pass of training begins, but not in compiled code.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy or pickle it, without the listener; `Counter` would leave all attributes out."""
        return type(self), (dict(self),), vars(self) | {"listener": None}


NOTE = "mxref: "
"""Begins a note on an exception that left an operator: which operator it was, and what it computed for which layer."""

backends: dict[str, Backend] = {}
_tallies: weakref.WeakValueDictionary[int, Census] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


@cache
def _version() -> str:
    """Return the overload of all operators, a digest of the sources of mxref, of this package and of the backends."""
    backends = entry_points(group=ENTRY_POINT_GROUP)
    packages = {"mxref", "mxref_torch", *(point.module.partition(".")[0] for point in backends)}
    digest = hashlib.sha256()
    for spec in filter(None, map(find_spec, sorted(packages))):
        for folder in spec.submodule_search_locations or ():
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(hashlib.sha256(f"{file.name}\0".encode() + file.read_bytes()).digest())
    return f"code_{digest.hexdigest()[:16]}"


def operator(
    like: Callable[..., Any], changes: str = ""
) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Return a decorator that makes a function the operator `mxref::<its name>`, in one overload.

    No result shares memory with another tensor, and no argument is changed, except the one that `changes` names, which
    has to be the first. `like` gets those of the operator's arguments that its parameters name, and returns results of
    the right shapes and types without values: compilers ask for them. PyTorch's `custom_op` makes the same, and adds
    three times as much to a call.
    """

    def decorate(function: Callable[..., Any]) -> torch._ops.OpOverload:
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
                # Tells autograd that its saved copy of the tensor is out of date.
                torch.autograd.graph.increment_version(arguments[0])
            try:
                # Autocast would reach the products inside: a backward pass may run within it.
                with torch._C._DisableAutocast():
                    return untraced()(*arguments)
            except BaseException as err:
                err.add_note(NOTE + _failed_in(name, named(arguments)))
                raise

        def named(arguments: Sequence[Any]) -> dict[str, Any]:
            return dict(zip(parameters, arguments, strict=False))

        def fake(*arguments: Any) -> Any:
            given = named(arguments)
            return like(*(given.get(key) for key in inspect.signature(like).parameters))

        name, parameters, version = (
            function.__name__,
            list(inspect.signature(function).parameters),
            _version(),
        )
        schema = library.infer_schema(function, mutates_args={changes} if changes else ())
        library.define(f"mxref::{name}.{version}", schema, tags=torch.Tag.pt2_compliant_tag)
        library.impl(f"mxref::{name}.{version}", "CompositeExplicitAutograd", kernel)
        overload: torch._ops.OpOverload = getattr(getattr(torch.ops.mxref, name), version)
        library.register_fake(overload, fake)
        overload.__doc__ = function.__doc__
        return overload

    return decorate


def _failed_in(name: str, given: dict[str, Any]) -> str:
    """Return which operator of which backend failed, with its GEMM's role and layer if it counts one."""
    backend = backends.get(given.get("backend", ""))
    whose = f"backend {backend.name!r} failed in " if backend else ""
    tally = given.get("tally")
    census = None if tally is None else _tallies.get(abs(int(tally.item())))
    layer = f", layer {census.name}" if isinstance(census, LayerCensus) and census.name else ""
    return f"{whose}{name}" + (f" ({given['role']}{layer})" if "role" in given else "")


def register_backend(backend: Backend) -> str:
    """Return the key by which operators find the backend: its name, numbered if another one has it."""
    key, number = backend.name, 1
    while backends.setdefault(key, backend) is not backend:
        number += 1
        key = f"{backend.name}#{number}"
    return key


def register_census(census: Census) -> torch.Tensor:
    """Return the handle under which GEMM operators count into `census`, for as long as it lives: int64 [1]."""
    handle = next(_handles)
    _tallies[handle] = census
    return _words([handle])


def count(
    tally: torch.Tensor | None,
    role: str,
    formats: tuple[OperandFormat, OperandFormat],
    rows: int,
    length: int,
) -> None:
    """Count a GEMM that ran into the census of a handle; None, or one that no longer lives, counts nowhere.

    A negative handle is that of an evaluation, of which the listener is not told. Fprop within a backward pass is
    recomputed by activation checkpointing, and such GEMMs are not counted.
    """
    handle, which = 0 if tally is None else int(tally.item()), GemmRole(role)
    census = _tallies.get(abs(handle))
    if isinstance(census, LayerCensus) and census.listener is not None and handle > 0:
        # Wgrad contracts over tokens; the others have a row for each.
        census.listener(which, length if which is GemmRole.WGRAD else rows)
    if census is None or (which is GemmRole.FPROP and torch._C._current_graph_task_id() != -1):
        return
    census[which, *formats] += 1
    if isinstance(census, LayerCensus):
        census.ran = True
        census.trained |= which is not GemmRole.FPROP


_device_step: torch.Tensor | None = None


@contextmanager
def device_step(step: torch.Tensor) -> Iterator[None]:
    """Have kernels of all threads read the step within the block, int64 [1], from the device, as a graph has to."""
    global _device_step
    before, _device_step = _device_step, step
    try:
        yield
    finally:
        _device_step = before


def step_on_device() -> torch.Tensor | None:
    """Return the step of `device_step`, if there is one."""
    return _device_step


def formats_text(a: OperandFormat, b: OperandFormat) -> str:
    """Return the formats of a GEMM's two operands for messages: one name if they are equal."""
    return a.name if a is b else f"{a.name} x {b.name}"


def gemm_text(gemm: Gemm) -> str:
    """Return a key of the census for messages, as in `fprop in mxfp4`."""
    role, a, b = gemm
    return f"{role.value} in {formats_text(a, b)}"


def in_order(gemms: Iterable[Gemm]) -> list[Gemm]:
    """Return GEMMs by role, then by the names of their formats."""
    roles = list(GemmRole)
    return sorted(set(gemms), key=lambda gemm: (roles.index(gemm[0]), gemm[1].name, gemm[2].name))


@lru_cache(maxsize=256)
def spec_text(spec: OperandSpec) -> str:
    """Return a spec as the compact JSON that operators take."""
    return json.dumps(to_table(spec), sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=256)
def parse_spec(text: str) -> OperandSpec:
    """Return the spec of `spec_text`; RecipeError on a key or value that does not exist."""
    return build(OperandSpec, json.loads(text), "operand spec")


def block_format(spec: OperandSpec) -> BlockFormat:
    """Return the block format of a spec that has blocks."""
    assert isinstance(spec.format, BlockFormat)
    return spec.format


def block_unit(spec: OperandSpec) -> int:
    """Return the length of which a block axis is a multiple: whole blocks and whole Hadamard groups."""
    return math.lcm(block_format(spec).k, spec.hadamard or 1)


def draws(spec: OperandSpec) -> bool:
    """Return whether an operand depends on its random stream."""
    return spec.rounding is Rounding.SR or spec.signs is not SignPolicy.NONE


def draws_by_layer(spec: OperandSpec) -> bool:
    """Return whether an operand depends on the layer of its random stream."""
    return spec.rounding is Rounding.SR or spec.signs is SignPolicy.PER_STEP_LAYER


def _words(values: Sequence[int]) -> torch.Tensor:
    """Return integers as operators take them, int64 on the CPU: of one graph for all values, as compilers need it."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def stream_words(seed: int, layer: int, operand: int) -> torch.Tensor:
    """Return a random stream without its step, int64 [4]: low and high half of the seed, layer, operand."""
    return _words([seed & 0xFFFFFFFF, seed >> 32, layer, operand])


def region_words(placement: Placement) -> torch.Tensor:
    """Return where a matrix lies as operators take it, int64 [4]: row, column, global rows, global columns.

    A global length of -1 is that of the matrix itself. A step's tokens are not in it: they come by `batch_place`.
    """
    return _words([*(placement.origin or (0, 0)), *(placement.global_shape or (-1, -1))])


WHOLE = region_words(Placement())
"""`region_words` of a matrix that is not part of a larger one."""


def batch_place(step: int, token_origin: int = 0, global_tokens: int | None = None) -> torch.Tensor:
    """Return where a micro-batch lies in training as int64 [3]: step, first token, tokens of the step or -1."""
    return _words([step, token_origin, -1 if global_tokens is None else global_tokens])


@dataclass(frozen=True)
class Quantized:
    """A quantization that an operator made."""

    backend: Backend
    """The backend that answered."""
    x: torch.Tensor
    """[M, N]."""
    spec: OperandSpec
    axis: int
    """The block axis, 0 or 1."""
    placement: Placement
    pad: bool
    """Whether the block axis is filled up with zeros."""
    q: MXArray
    """The answer, of the backend's arrays."""

    @property
    def stream(self) -> Stream | None:
        """The random stream with the number of the step, which may lie on the device."""
        stream, step = self.placement.stream, self.placement.step
        return stream if stream is None or step is None else replace(stream, step=int(step))

    @property
    def random(self) -> bool:
        """Whether the answer depends on random bits, so that the stream names the layer and the operand."""
        return draws(self.spec)


@dataclass(frozen=True)
class Multiplied:
    """A scaled GEMM that an operator computed."""

    backend: Backend
    """The backend that answered."""
    a: MXArray
    """[M, K], of the backend's arrays."""
    b: MXArray
    """[N, K]."""
    profile: GemmProfile
    out_dtype: str
    """`float32` or `bfloat16`."""
    role: str
    """The linear layer's GEMM."""
    product: Any
    """The answer [M, N], an array of the backend."""


watchers: list[Any] = []
"""
Their methods `quantized` and `multiplied` receive every operation of block formats. `reading` receives the index of a
layer and the tensor, `x`, `w` or `dy`, that the next operators read.
"""
