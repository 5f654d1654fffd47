"""The common interface of all kinds of operands of a layer's GEMMs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from mxref.backend import Backend
from mxref.formats import OperandFormat
from mxref.recipe import GemmProfile, OperandSpec, ResultType
from mxref.roles import GemmRole
from mxref_torch import operators
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.shared.context import StepContext


@dataclass(eq=False)
class LayerGemm:
    """One of a layer's three GEMMs: how its operands are made and multiplied."""

    role: GemmRole
    kind: type[Operand]
    """The class of its two operands."""
    texts: list[str]
    """Treatments of the two operands, from `spec_text`."""
    streams: list[torch.Tensor]
    """Their random streams, from `stream_words`."""
    by_layer: list[bool]
    """Whether their random bits are the layer's own."""
    profile: GemmProfile
    context: StepContext
    tally: torch.Tensor
    """The layer's census, from `register_census`."""
    scales: Fp8Scales | None
    """The scales of a layer with FP8."""
    lays_out_first: bool
    """Whether the backend's GEMM reads a layout of its first operand too."""
    gain: float
    """By which the product is multiplied, a float32."""
    out: ResultType
    """The type to which the product is rounded."""
    source: LayerGemm | None = None
    """Fprop, where the second operand is made of the values of Fprop's operand; None: it is made of the tensor."""
    held: Operand | None = None
    """W, where the step was opened by `mxref_torch.weights_held`; None: it is made of the weight each time."""

    @property
    def plain(self) -> bool:
        """Whether the product is the result: it has no gain, and no type of its own."""
        return self.gain == 1 and self.out is ResultType.TENSOR


Reader = tuple[LayerGemm, int]
"""A GEMM that reads a tensor, and which of its operands the tensor is."""


@dataclass(eq=False)
class SourceTensor:
    """A tensor from which operands are made, and where it lies."""

    tensor: str
    """`x`, `w` or `dy`."""
    values: torch.Tensor
    """[tokens, features], or the weight [outputs, inputs]."""
    place: torch.Tensor
    """Step and tokens, from `step_place`."""
    region: torch.Tensor
    """Place in the layer's whole tensor, from `region_words`."""
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Returns the largest amax over the ranks that have the other parts of the tensor; None: there are none."""


class Operand(ABC):
    """An operand as its GEMM reads it. A subclass holds what a kind of format needs."""

    adds_in_place: ClassVar[bool] = False
    """Whether `multiply_onto` exists for this kind."""
    worth_holding: ClassVar[bool] = True
    """Whether `mxref_torch.weights_held` holds W of this kind."""

    @classmethod
    @abstractmethod
    def make(cls, source: SourceTensor, readers: Sequence[Reader]) -> Sequence[Self]:
        """Return a tensor as each of one or two GEMMs of this kind reads it, in their order."""

    @classmethod
    @abstractmethod
    def element_bytes(cls, format: OperandFormat) -> float:
        """Return the bytes that a saved operand takes per element, its scales included."""

    @classmethod
    def draws(cls, spec: OperandSpec, backend: Backend) -> bool:
        """Return whether an operand depends on the step's random bits."""
        return False

    @classmethod
    @abstractmethod
    def restored(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """Return the operand of the tensors of `saved`."""

    @abstractmethod
    def saved(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that forward saves so that backward can multiply this operand."""

    def observe(self, tensor: str, gemm: LayerGemm) -> None:  # noqa: B027 - most kinds have no history
        """Record in the layer's history of scales, if there is one, that training read this operand."""

    def prepared(self, gemm: LayerGemm, length: int) -> Self:
        """Return a second operand with the layout that the backend's GEMM reads, if it has one."""
        return self

    def values(self, gemm: LayerGemm, which: int) -> torch.Tensor:
        """Return the values of Fprop's operand, float32 in the shape of X or W; block formats alone have it.

        Args:
            gemm: Fprop.
            which: which of its operands this is.
        """
        raise NotImplementedError

    def product(self, other: Self, gemm: LayerGemm, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the product times the gain, rounded to the GEMM's output type; the rest as in `multiply`."""
        if gemm.plain:
            return self.multiply(other, gemm, length, dtype)
        if gemm.gain != 1:
            product = self.multiply(other, gemm, length, torch.float32)
            name = str(dtype).removeprefix("torch.")
            gained: torch.Tensor = operators.gained(product, gemm.gain, gemm.out is ResultType.BF16, name)
            return gained
        narrow = self.multiply(other, gemm, length, torch.bfloat16)
        return narrow if dtype is torch.bfloat16 else narrow.to(dtype)

    @abstractmethod
    def multiply(self, other: Self, gemm: LayerGemm, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the product of the first operand with the second, [M, N] of `dtype`.

        Args:
            other: the second operand.
            gemm: the GEMM.
            length: its contraction length.
            dtype: float32 or bfloat16.
        """

    def multiply_onto(self, onto: torch.Tensor, other: Self, gemm: LayerGemm, length: int) -> None:
        """Add the product to a contiguous float32 array [M, N] in place; the rest as in `multiply`."""
        raise NotImplementedError
