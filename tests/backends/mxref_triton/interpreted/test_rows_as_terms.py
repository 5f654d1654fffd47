"""What proofs are made of, the row kernel's compiled IR as terms, gives the bytes of the interpreted source."""

import numpy as np
import pytest
import torch

from mxref.recipe import OperandSpec
from mxref.steps.scale import ScaleRule
from mxref_triton.backend import TritonBackend
from prove.certificates import proof_of
from prove.counterexamples import float32_of, some_blocks, stored_by_kernel
from prove.kernels import compile_cases

CASES = (
    "mxfp4.even.bfloat16",
    "mxfp4.floor.float16",
    "mxfp6_e2m3.ceil.bfloat16",
    "mxfp8_e5m2.rceil.bfloat16",
)


@pytest.mark.clause("quantize.order")
def test_the_terms_of_the_ir_are_the_source():
    for compiled in compile_cases("gfx950", CASES):
        proof = proof_of(compiled)
        blocks = some_blocks(proof, 10_000, seed=5)
        words, scales = stored_by_kernel(proof, blocks)
        x = torch.from_numpy(float32_of(proof.case, blocks)).to(getattr(torch, proof.case.dtype))
        spec = OperandSpec(proof.case.block, ScaleRule(proof.case.rule))
        found = TritonBackend().quantize(x, spec, axis=1)
        assert (words.astype("<u4").view(np.uint8) == found.codes.numpy()).all(), compiled.case
        assert (scales == found.scales[:, 0].numpy()).all(), compiled.case
