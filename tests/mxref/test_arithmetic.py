"""Orders of float32 operations that implementations of NVFP4 have: the oracle, known bytes, and one that runs here."""

import numpy as np
import pytest

import oracle
from differential import assert_same_blocks, oracle_quantize_tensor
from mxref import DIALECTS, MXFP4, NVFP4, Arithmetic, OperandSpec, Placement, Stream, dequantize, quantize
from mxref.dialects import dialects_of
from mxref.errors import RecipeError
from mxref.explain import explain_block
from mxref.formats import E2M1, E4M3, UE4M3, UE5M3, BlockFormat
from mxref.layouts.packed import unpack
from oracle import E2M1 as ORACLE_E2M1
from oracle import UE4M3 as ORACLE_UE4M3
from scale_blocks import Blocks, arrays
from strategies import FLT_MAX

ORDERS = [each for each in Arithmetic if each is not Arithmetic.REAL]
STREAM = Stream(0x0123456789ABCDEF, step=11, layer=5, operand=2)
AMAXES = [0x45280000, 0x43820000, 0x3EB7A2C5, FLT_MAX, 1, 5000, 0x00A80000, 0]


def blocks(amax: float, arithmetic: str, *first: float):
    """One block for each first element, the rest of it zeros, in a tensor with this amax."""
    x = np.zeros((len(first), 16), np.float32)
    x[:, 0] = first
    placement = Placement(amax=np.array([amax], np.float32))
    q = quantize(x, OperandSpec(format=NVFP4, arithmetic=arithmetic), placement=placement)
    return q.scales.ravel().tolist(), unpack(q.codes, E2M1)


def assert_as_the_oracle(x, spec, amax, names=None):
    placement = Placement(STREAM, amax=np.array([amax], np.uint32).view(np.float32))
    q = quantize(x, spec, placement=placement)
    *want, tensor = oracle_quantize_tensor(x, spec, STREAM, amax=amax)
    if spec.format.tensor_scale:
        assert hex(q.tensor_scale.view(np.uint32)[0]) == hex(tensor)
    assert_same_blocks(unpack(q.codes, spec.format.element), q.scales, *want, names=names)


@pytest.mark.clause(
    "scale.arithmetic", "scale.nonfinite", "rounding.saturate", "rounding.sign", "rounding.rne"
)
@pytest.mark.parametrize("amax", AMAXES, ids=hex)
@pytest.mark.parametrize("order", ORDERS)
def test_each_order_gives_the_bytes_of_its_operations(order, amax):
    """Ties of scales and of elements under the tensor's scale and under 1, float32 beside them, and all else."""
    rng = np.random.default_rng(amax)
    t = oracle.tensor_scale_in(order.value, amax, ORACLE_E2M1, ORACLE_UE4M3)
    rows = []
    for tensor in {oracle.ONE, min(t, FLT_MAX)}:
        crafted = Blocks(ORACLE_E2M1, ORACLE_UE4M3, 16, tensor)
        rows += crafted.scale_turns(rng, 127 if amax == 0x43820000 else 12)
        rows += crafted.element_turns(rng, [1, 2, 3, 7, 8, 9, 31, 56, 119, 126])
        rows += [*crafted.special(rng), *crafted.drawn(rng, 12)]
    names, x = arrays(rows)
    assert_as_the_oracle(x, OperandSpec(NVFP4, arithmetic=order), amax, names)


@pytest.mark.clause("scale.arithmetic", "rounding.rna", "rounding.rtz", "rounding.sr", "scale.block.tile")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rounding", ["rna", "rtz", "sr"])
def test_an_order_with_every_rounding_and_in_tiles(order, rounding):
    rng = np.random.default_rng(5)
    crafted = Blocks(ORACLE_E2M1, ORACLE_UE4M3, 16)
    names, x = arrays([*crafted.element_turns(rng, [2, 9, 56, 118]), *crafted.drawn(rng, 8)])
    spec = OperandSpec(NVFP4, arithmetic=order, rounding=rounding)
    assert_as_the_oracle(x, spec, 0x45280000, names)
    tiles = OperandSpec(NVFP4, arithmetic=order, rounding=rounding, block="16x16", hadamard=16)
    drawn = rng.standard_normal((32, 32)).astype(np.float32)
    assert_as_the_oracle(drawn, tiles, 0x41200000)


@pytest.mark.clause("scale.arithmetic")
@pytest.mark.parametrize("order", ORDERS)
def test_an_order_in_other_formats(order):
    """M and S are those of the format; without a scale of the tensor A is 0 and t is 1."""
    for made in (
        BlockFormat("e4m3_ue5m3", E4M3, UE5M3, k=64, tensor_scale=True), BlockFormat("fp4_ue4m3", E2M1, UE4M3, k=8),
    ):  # fmt: skip
        rng = np.random.default_rng(6)
        crafted = Blocks(oracle.ELEMENTS[made.element.name], oracle.SCALES[made.scale.name], made.k)
        rows = [*crafted.scale_turns(rng, 20), *crafted.special(rng), *crafted.drawn(rng, 8)]
        assert_as_the_oracle(arrays(rows)[1], OperandSpec(made, arithmetic=order), 0x45280000)


@pytest.mark.clause("scale.arithmetic", "scale.rule.nearest", evidence="known answer")
def test_a_quotient_just_below_a_tie_tells_the_orders_apart():
    """1.5234375 / 6 over 260 / 2688 is just below 2.625; Transformer Engine from 2.14 on takes it for that tie."""
    with_a_tensor = [each for each in Arithmetic if each not in ("compressed_tensors", "ggml")]
    stored = {each.value: blocks(260, each, 1.5234375)[0] for each in with_a_tensor}
    assert stored == {"real": [0x42], "te": [0x43], "te_2_13": [0x42], "torchao": [0x42], "modelopt": [0x42]}


@pytest.mark.clause("scale.arithmetic", evidence="known answer")
@pytest.mark.parametrize(
    ("arithmetic", "zero", "tiny", "codes"),
    [("te", 0x00, 0x00, 7), ("te_2_13", 0x00, 0x00, 7), ("torchao", 0x08, 0x08, 0), ("modelopt", 0x38, 0x01, 0),
     ("compressed_tensors", 0x20, 0x20, 0), ("ggml", 0x00, 0x00, 0)],
)  # fmt: skip
def test_blocks_of_zeros_and_blocks_whose_scale_underflows(arithmetic, zero, tiny, codes):
    """The tiny block is 2^-30 of the tensor's amax; where the scale is 0 Transformer Engine's elements saturate."""
    scales, found = blocks(2688.0, arithmetic, 0.0, -2688.0 * 2.0**-30, 2688.0)
    assert scales == [zero, tiny, 0x7E]
    assert found[:, 0].tolist() == [0, codes | 8, 7]


@pytest.mark.clause("scale.arithmetic", evidence="known answer")
def test_ggml_casts_halves_up_and_248_to_448_and_breaks_ties_of_elements_down():
    """q = a / 6: the middles of 1 and 1.125, of the two smallest scales, below the smallest normal one, and 248."""
    a = 6 * np.array([1.0625, 2.0**-10, 7.75 * 2.0**-9, 248, 247.9], np.float32)
    assert blocks(1, "ggml", *a)[0] == [0x39, 0x01, 0x07, 0x7E, 0x77]
    x = np.zeros((1, 16), np.float32)
    x[0, :8] = 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5
    q = quantize(x, "ggml_nvfp4")
    assert q.tensor_scale.tolist() == [1]
    assert dequantize(q)[0, :8].tolist() == [6, 0, 0.5, 1, 1.5, 2, 3, 4]


@pytest.mark.clause("scale.arithmetic", evidence="known answer")
def test_compressed_tensors_rounds_its_inverse_twice():
    """2688 / A and 2688 times the float32 nearest to 1 / A differ for this A, and t is the inverse of the second."""
    amax = np.float32(2.9)
    once, twice = np.float32(2688) / amax, np.float32(1) / amax * np.float32(2688)
    assert once != twice
    q = quantize(np.full((1, 16), amax), "compressed_tensors_nvfp4")
    assert q.tensor_scale[0] == np.float32(1) / twice


@pytest.mark.clause("scale.arithmetic", "dialect.torchao_nvfp4")
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_torchao_gives_the_bytes_of_its_order(scale):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((64, 256)) * np.exp(2 * rng.standard_normal((64, 1))) * scale).astype(np.float32)
    tensor = torch.from_numpy(x)
    t = module.per_tensor_amax_to_scale(tensor.abs().max())
    scales, codes = module.nvfp4_quantize(tensor, 16, t)
    q = quantize(x, "torchao_nvfp4")
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


@pytest.mark.clause("scale.arithmetic")
@pytest.mark.parametrize("arithmetic", ORDERS)
@pytest.mark.parametrize("first", [0.0, 3e-9, 1.5234375, 7.0])
def test_an_explanation_has_the_bytes_of_the_order(arithmetic, first):
    x = np.array([first, -0.4, 0.75, 0, *[first / 7] * 12], np.float32)
    x[1:3] *= first
    spec = OperandSpec(format=NVFP4, arithmetic=arithmetic)
    found = explain_block(x, spec, amax=260)
    q = quantize(x, spec, placement=Placement(amax=np.array([260], np.float32)))
    assert found.scale.byte == q.scales[0]
    assert found.packed == q.codes.tobytes()
    assert [e.value for e in found.elements] == dequantize(q, "float64").tolist()


@pytest.mark.clause(
    "dialect.te_mxfp8", "dialect.te_nvfp4", "dialect.torchao_nvfp4", "dialect.modelopt_nvfp4",
    "dialect.compressed_tensors_nvfp4", "dialect.ggml_nvfp4",
)  # fmt: skip
def test_the_dialects_of_a_format():
    orders = {"te", "torchao", "modelopt", "compressed_tensors", "ggml"}
    assert {f"{order}_nvfp4": OperandSpec(NVFP4, arithmetic=order) for order in orders} == dialects_of(NVFP4)
    assert DIALECTS["te_mxfp8"].spec == OperandSpec("mxfp8_e4m3", scale_rule="rceil")
    assert [*dialects_of(MXFP4)] == ["ocp", "amd", "nvidia", "tseng"]
    assert dialects_of(DIALECTS["te_mxfp8"].spec.format)["nvidia"] == DIALECTS["te_mxfp8"].spec
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    for name, spec in dialects_of(NVFP4).items():
        assert quantize(x, name) == quantize(x, spec)
