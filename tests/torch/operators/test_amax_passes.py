"""A tensor's largest magnitude is read once for both of its operands, unless a transform makes them differ."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from mxref import OperandSpec, get_backend
from mxref.formats import MXFP4, NVFP4
from mxref.steps.quotient import Arithmetic
from mxref_torch import operators
from mxref_torch.operators import blocks

PLAIN = OperandSpec(NVFP4)
CASES = {
    "both plain": (PLAIN, PLAIN, 1),
    "another rounding": (PLAIN, replace(PLAIN, rounding="sr"), 1),
    "one turned": (PLAIN, replace(PLAIN, hadamard=16), 2),
    "both turned": (replace(PLAIN, hadamard=16), replace(PLAIN, hadamard=16), 2),
    "another arithmetic": (PLAIN, replace(PLAIN, arithmetic=Arithmetic.TORCHAO), 2),
    "one without a scale of the tensor": (PLAIN, OperandSpec(MXFP4), 1),
    "neither": (OperandSpec(MXFP4), OperandSpec(MXFP4), 0),
}


def quantized(
    x: torch.Tensor, key: str, row: OperandSpec | None, column: OperandSpec | None
) -> list[torch.Tensor]:
    texts = ["" if spec is None else operators.spec_text(spec) for spec in (row, column)]
    streams = [
        None if spec is None else operators.stream_words(1, 2, operand)
        for operand, spec in enumerate((row, column))
    ]
    request = operators.batch_place(3, 0, x.shape[0]), key, *texts, *streams, operators.WHOLE, True
    made = blocks.quantize(x, *request)
    alone = blocks.quantize(x, *request, blocks.tensor_amax(x, *request))
    assert all(torch.equal(a, b) for a, b in zip(made, alone, strict=True))
    return made


@pytest.mark.parametrize("name", CASES)
def test_the_tensor_is_read_once_where_that_is_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, column, expected = CASES[name]
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
    key = operators.register_backend(get_backend("reference"))
    parts = [quantized(x, key, row, None), quantized(x, key, None, column)]
    passes, amax = [], blocks._Request.amax

    def counted(self: Any, *given: Any) -> Any:
        passes.append(self.axis)
        return amax(self, *given)

    monkeypatch.setattr(blocks._Request, "amax", counted)
    texts = [operators.spec_text(spec) for spec in (row, column)]
    streams = [operators.stream_words(1, 2, operand) for operand in (0, 1)]
    both = blocks.quantize(x, operators.batch_place(3, 0, 32), key, *texts, *streams, operators.WHOLE, True)
    assert len(passes) == expected
    for found, wanted in zip(both, [t for part in parts for t in part], strict=True):
        assert torch.equal(found, wanted)
