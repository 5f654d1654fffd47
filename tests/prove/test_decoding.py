"""Kernels that dequantize are proved to be their clauses, and planted faults are not."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from click.testing import CliRunner

from mxref import dequantize
from mxref.cli import main
from mxref.formats import BLOCK_FORMATS
from mxref.mxarray import MXArray
from prove.certificates import decide, proof_of
from prove.decoding import CodeExample
from prove.kernels import Compiled, Decoding, cases
from prove.planted import flipped
from prove.questions import NotProved
from prove.terms import evaluate
from prove.ttir import UnknownOperation, without_locations
from usual import usual

DECODED = [name for name, case in cases().items() if isinstance(case, Decoding)]
E2M1, E4M3, NVFP4 = (f"dequantize.{made}.float32" for made in ("mxfp4", "mxfp8_e4m3", "nvfp4"))
FAULTS = {
    "the smallest scale": (E2M1, ("dense<4194304>", "dense<4194305>")),
    "the NaN of a block": (E2M1, ("dense<255>", "dense<254>")),
    "a sign": (E2M1, ("dense<-2147483648>", "dense<1073741824>")),
    "NaN codes": (E4M3, ("dense<126>", "dense<127>")),
    "a value's unit": (E4M3, ("1.32922", "1.32923")),
    "one byte": (E4M3, lambda text: flipped(without_locations(text), "arith.ori", {"%46": 3}, 0, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", usual(DECODED, E2M1, "dequantize.mxfp6_e3m2.bfloat16", NVFP4))
def test_the_terms_give_the_references_values(compiled, name):
    proof = proof_of(compiled("gfx950", name))
    case, made = proof.case, proof.case.block
    random = np.random.default_rng(1)
    count = 512
    codes = random.integers(0, 1 << made.element.bits, (count, proof.together))
    scales = random.integers(0, 256, count)
    scales[:6] = 0, 1, 2, 253, 254, 255
    values = {f"code{i}": codes[:, i] for i in range(proof.together)} | {"byte": scales, "tensor": 0x3E123457}
    found = np.stack([np.broadcast_to(x, count) for x in evaluate(proof.values, values)], 1)
    shift = np.arange(made.element.bits)
    padded = np.zeros((count, made.k), dtype=np.int64)
    padded[:, : proof.together] = codes
    bits = (padded[:, :, None] >> shift & 1).reshape(count, -1).astype(np.uint8)
    tensor = np.array([0x3E123457], np.uint32).view(np.float32) if made.tensor_scale else None
    q = MXArray(
        np.packbits(bits, axis=1, bitorder="little"), scales[:, None].astype(np.uint8), padded.shape, 1,
        format=made, tensor_scale=tensor,
    )  # fmt: skip
    right = dequantize(q, case.dtype)[:, : proof.together]
    word = {"float32": np.uint32, "bfloat16": np.uint16}[case.dtype]
    assert (found == np.ascontiguousarray(right).view(word)).all()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_has_a_counterexample(compiled, fault):
    pytest.importorskip("bitwuzla", reason="bitwuzla is not installed")
    name, change = FAULTS[fault]
    now = compiled("gfx950", name)
    text = change(now.ttir) if callable(change) else now.ttir.replace(*change)
    assert text != now.ttir
    with pytest.raises(NotProved, match="code 0x") as caught:
        list(decide(Compiled(name, "gfx950", now.kernel, text, []), {}))
    print(f"{fault}: {caught.value}")
    if caught.value.command:
        assert CliRunner().invoke(main, caught.value.command.split()[1:]).exit_code == 0


def test_a_byte_of_another_block_has_no_proof(compiled):
    now = compiled("gfx950", E4M3)
    text = now.ttir.replace("arith.divsi", "arith.addi", 1)
    assert text != now.ttir
    with pytest.raises(NotProved, match="places"):
        list(decide(Compiled(E4M3, "gfx950", now.kernel, text, []), {}))


def test_comparisons_of_floats_are_refused_but_for_nan(compiled):
    now = compiled("gfx950", E4M3)
    text = now.ttir.replace("cmpf une", "cmpf ult", 1)
    assert text != now.ttir
    with pytest.raises(UnknownOperation, match="cmpf"):
        proof_of(Compiled(E4M3, "gfx950", now.kernel, text, []))


def test_a_command_shows_a_code_where_a_block_has_it():
    case = cases()[E4M3]
    assert CodeExample(case, 0x7E, 127).command == "mxref explain --format mxfp8_e4m3 448.0 256.0"
    assert CodeExample(case, 0x01, 255).command == "mxref explain --format mxfp8_e4m3 nan"
    assert CodeExample(case, 0x7E, 254).command is None
    assert "no command shows it" in CodeExample(case, 0x7E, 254).place
    assert BLOCK_FORMATS["nvfp4"].scale.powers is False
    assert CodeExample(cases()[NVFP4], 1, 2, 0x3F800000).command is None
