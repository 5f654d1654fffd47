"""Orders of float32 operations that implementations of NVFP4 have, by known bytes and by one that runs here."""

import numpy as np
import pytest

from mxref import NVFP4, Arithmetic, OperandSpec, Placement, UnsupportedError, quantize
from mxref.errors import RecipeError
from mxref.explain import explain_block
from mxref.formats import E2M1
from mxref.layouts.packed import unpack

ORDERS = [each for each in Arithmetic if each is not Arithmetic.REAL]


def blocks(amax: float, arithmetic: str, *first: float):
    """One block for each first element, the rest of it zeros, in a tensor with this amax."""
    x = np.zeros((len(first), 16), np.float32)
    x[:, 0] = first
    placement = Placement(amax=np.array([amax], np.float32))
    q = quantize(x, OperandSpec(format=NVFP4, arithmetic=arithmetic), placement=placement)
    return q.scales.ravel().tolist(), unpack(q.codes, E2M1)


@pytest.mark.clause("scale.arithmetic", "scale.rule.nearest", evidence="known answer")
def test_a_quotient_just_below_a_tie_tells_the_orders_apart():
    """1.5234375 / 6 over 260 / 2688 is just below 2.625; Transformer Engine from 2.14 on takes it for that tie."""
    stored = {
        each.value: blocks(260, each, 1.5234375)[0] for each in Arithmetic if each != "compressed_tensors"
    }
    assert stored == {"real": [0x42], "te": [0x43], "te_2_13": [0x42], "torchao": [0x42], "modelopt": [0x42]}


@pytest.mark.clause("scale.arithmetic", evidence="known answer")
@pytest.mark.parametrize(
    ("arithmetic", "zero", "tiny", "codes"),
    [("te", 0x00, 0x00, 7), ("te_2_13", 0x00, 0x00, 7), ("torchao", 0x08, 0x08, 0), ("modelopt", 0x38, 0x01, 0),
     ("compressed_tensors", 0x20, 0x20, 0)],
)  # fmt: skip
def test_blocks_of_zeros_and_blocks_whose_scale_underflows(arithmetic, zero, tiny, codes):
    """The tiny block is 2^-30 of the tensor's amax; where the scale is 0 every element saturates."""
    scales, found = blocks(2688.0, arithmetic, 0.0, -2688.0 * 2.0**-30, 2688.0)
    assert scales == [zero, tiny, 0x7E]
    assert found[:, 0].tolist() == [0, codes | 8, 7]


@pytest.mark.clause("scale.arithmetic")
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_torchao_gives_the_bytes_of_its_order(scale):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((64, 256)) * np.exp(2 * rng.standard_normal((64, 1))) * scale).astype(np.float32)
    tensor = torch.from_numpy(x)
    t = module.per_tensor_amax_to_scale(tensor.abs().max())
    scales, codes = module.nvfp4_quantize(tensor, 16, t)
    q = quantize(x, OperandSpec(format=NVFP4, arithmetic="torchao"))
    assert q.tensor_scale[0] == t.item()
    assert np.array_equal(q.scales, scales.view(torch.uint8).numpy().reshape(q.scales.shape))
    assert np.array_equal(q.codes, codes.numpy())


@pytest.mark.clause("scale.arithmetic", "recipe.unknown")
@pytest.mark.parametrize("arithmetic", ORDERS)
def test_what_has_no_such_order_is_refused_by_name(arithmetic):
    with pytest.raises(RecipeError, match=f"arithmetic = '{arithmetic}' with the format mxfp4"):
        OperandSpec(arithmetic=arithmetic)
    with pytest.raises(RecipeError, match="zero_scale = 56"):
        OperandSpec(format=NVFP4, arithmetic=arithmetic, zero_scale=56)
    with pytest.raises(UnsupportedError, match=f"arithmetic = '{arithmetic}'"):
        explain_block(np.ones(16, np.float32), OperandSpec(format=NVFP4, arithmetic=arithmetic))
