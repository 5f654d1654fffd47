"""Models, recipes, inputs and recording backends that the tests of the linear layer share."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import torch
from torch import nn

from mxref import GemmRole, PreparedArray, Stream, dequantize, get_backend, quantize, scaled_gemm
from mxref.errors import MxrefError
from mxref.placement import Placement
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend
from mxref.roles import OPERANDS
from mxref.steps.hadamard import draw_rotation, hadamard
from mxref_torch import convert, operators
from mxref_torch.operators import blocks

try:
    BACKENDS = ["reference", get_backend("numba").name]
except MxrefError:
    BACKENDS = ["reference"]

SEED, STEP, LAYER, TOKENS, IN, OUT = 0xFEDC_BA98_7654_3210, 3, 1, 64, 64, 128

NVFP4 = {
    "all": {"format": "nvfp4"},
    "fprop": {"w": {"block": "16x16"}},
    "dgrad": {"w": {"block": "16x16"}, "dy": {"rounding": "sr"}},
    "wgrad": {"dy": {"rounding": "sr"}, "hadamard": 16, "sign_vector": "+++-+------+-+--"},
}
"""The recipe nvfp4 in layers that it does not keep in BF16."""

TABLES = {
    "ocp": {},
    "amd": {"dialect": "amd", "all": {"hadamard": 16}},
    "rceil, SR in the backward": {
        "dialect": "nvidia",
        "dgrad": {"dy": {"rounding": "sr"}},
        "wgrad": {"rounding": "sr", "x": {"sr_bits": 20}},
    },
    "RHT per step": {"all": {"hadamard": 16, "signs": "per_step"}, "wgrad": {"hadamard": 32}},
    "32x32": {"all": {"block": "32x32"}, "fprop": {"x": {"block": "1x32"}}},
    "tseng": {"dialect": "tseng", "fprop": {"rounding": "rne", "prescale": False}},
    "from Fprop's operands": {
        "fprop": {
            "rounding": "sr",
            "x": {"format": "mxfp8_e4m3", "scale_rule": "rceil"},
            "w": {"block": "32x32"},
        },
        "dgrad": {"source": "fprop", "rounding": "sr", "out": "bf16"},
        "wgrad": {
            "source": "fprop",
            "hadamard": 16,
            "signs": "per_step",
            "x": {"rounding": "sr"},
            "gain": 1.25,
        },
    },
    "gains and types": {
        "fprop": {"gain": 0.7},
        "dgrad": {"gain": 1.1, "out": "bf16"},
        "wgrad": {"prescale": True, "out": "bf16"},
    },
    "SR everywhere": {"all": {"rounding": "sr", "sr_bits": 8}},
    "nvfp4": NVFP4,
    "nvfp4 beside others": {
        "fprop": {"format": "nvfp4"},
        "dgrad": {"format": "nvfp4", "source": "fprop", "rounding": "sr", "sr_bits": 22},
        "wgrad": {"format": "mxint8", "hadamard": 64, "signs": "per_step"},
    },
}


def recipe_of(table):
    return recipe_from_table({"gemm": "ordered", "keep_bf16": ["kept"], **table})


def formats(fprop, dgrad, wgrad):
    return recipe_of({"fprop": {"format": fprop}, "dgrad": {"format": dgrad}, "wgrad": {"format": wgrad}})


class Model(nn.Module):
    """A kept layer first, so that the converted one has index 1."""

    def __init__(self, bias=False):
        super().__init__()
        self.kept = nn.Linear(IN, 10)
        self.layer = nn.Linear(IN, OUT, bias=bias)

    def forward(self, x):
        return self.layer(x)


def build(recipe, backend="reference", **kwargs):
    torch.manual_seed(0)
    model = Model(**kwargs)
    backend = get_backend(backend) if isinstance(backend, str) else backend
    return model, convert(model, recipe, backend=backend, seed=SEED).context


def tensors(tokens=TOKENS, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, n, generator=generator) for n in (IN, OUT))
    return x.to(dtype).requires_grad_(), dy.to(dtype)


def as_numpy(t):
    t = t.detach()
    return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype is torch.bfloat16 else t.numpy()


def amax_of(t, spec, axis):
    """The largest magnitude of finite values after given signs and the transform, float32 [1]."""
    rows = np.moveaxis(t, axis, -1).astype(np.float32)
    rows = np.pad(rows, [(0, 0), (0, -rows.shape[1] % max(spec.hadamard, 1))])
    if spec.hadamard:
        assert spec.signs == "none"
        rows = hadamard(rows, draw_rotation(spec.hadamard, spec.signs, None, spec.sign_vector))
    return np.abs(rows).max(keepdims=True).reshape(-1)[:1]


def composed(role, a, b, recipe, out_dtype, origin=0, total=None):
    """One GEMM from `mxref.quantize`, `dequantize` and `scaled_gemm` alone."""

    def quantized(t, spec, operand):
        placement = Placement(Stream(SEED, STEP, LAYER, operand.id))
        pad = operand.tensor != "w" and operand.axis == 0
        if operand.tensor != "w" and spec.rounding == "sr":
            amax = amax_of(t, spec, operand.axis) if spec.format.tensor_scale else None
            whole = total or t.shape[0], t.shape[1]
            placement = replace(placement, origin=(origin, 0), global_shape=whole, amax=amax)
        return quantize(t, spec, axis=operand.axis, placement=placement, pad=pad)

    (first, second), keys, b = OPERANDS[role], getattr(recipe, role.value), as_numpy(b)
    if getattr(keys, "source", "tensor") == "fprop":
        made = next(operand for operand in OPERANDS[GemmRole.FPROP] if operand.tensor == second.tensor)
        b = dequantize(quantized(b, getattr(recipe.fprop, second.tensor), made))
    specs = recipe.operands(role)
    operands = quantized(as_numpy(a), specs[0], first), quantized(b, specs[1], second)
    if keys.gain == 1:
        product = scaled_gemm(
            *operands, profile=recipe.gemm, out_dtype="bfloat16" if keys.out == "bf16" else out_dtype
        )
    else:
        product = scaled_gemm(*operands, profile=recipe.gemm) * np.float32(keys.gain)
        product = product.astype(ml_dtypes.bfloat16) if keys.out == "bf16" else product
    return product.astype(ml_dtypes.bfloat16 if out_dtype == "bfloat16" else out_dtype)


def assert_composed(model, context, recipe, x, dy, origin=0, total=None):
    context.step, context.token_origin, context.global_tokens = STEP, origin, total
    y = model(x)
    y.backward(dy)
    name = str(x.dtype).removeprefix("torch.")
    w = model.layer.weight
    placed = {"origin": origin, "total": total}
    expected = {
        "Y": (y, composed(GemmRole.FPROP, x, w, recipe, name, **placed)),
        "dX": (x.grad, composed(GemmRole.DGRAD, dy, w, recipe, name, **placed)),
        "dW": (w.grad, composed(GemmRole.WGRAD, dy, x, recipe, "float32", **placed)),
    }
    for what, (got, wanted) in expected.items():
        np.testing.assert_array_equal(as_numpy(got), wanted, err_msg=what)


def recorder(base):
    """Return a copy of a backend that records the codes by operand id, and the operand ids of each read."""

    class Recorder(type(get_backend(base))):
        name = "recorder"

        def __init__(self):
            super().__init__()
            self.seen, self.reads = {}, []

        def quantize(self, x, spec, *, placement, **kwargs):
            q = super().quantize(x, spec, placement=placement, **kwargs)
            self.keep((placement,), (q,))
            return q

        def quantize_dual(self, x, specs, *, placements, **kwargs):
            pair = super().quantize_dual(x, specs, placements=placements, **kwargs)
            self.keep(placements, pair)
            return pair

        def keep(self, placements, arrays):
            operands = tuple(placement.stream.operand for placement in placements)
            self.reads.append(operands)
            for operand, q in zip(operands, arrays, strict=True):
                self.seen.setdefault(operand, []).append(q)

    return Recorder()


class Laying(ReferenceBackend):
    """Its GEMM reads a layout of B, whose parts share memory with B and with each other."""

    name = "laying"

    def __init__(self):
        self.prepared, self.read = [], 0

    def _prepare(self, q, profile):
        self.prepared.append(tuple(q.shape))
        scales = q.scales.copy()
        return q.codes, scales, scales[:1]

    def _scaled_gemm(self, a, b, profile, out_dtype):
        if isinstance(b, PreparedArray):
            self.read += 1
            codes, scales, first = b.layout
            assert np.array_equal(scales[:1], first)
            assert type(b.codes) is type(codes)
            b = replace(b, codes=codes, scales=scales)
        return super()._scaled_gemm(a, b, profile, out_dtype)


def quantize_calls(x, key):
    """Calls of the operator `quantize`, with their arguments: rows in SR, columns of a transform, and both."""
    place, stream, other = (
        operators.batch_place(1, 32, 128),
        operators.stream_words(SEED, 2, 0),
        operators.stream_words(SEED, 2, 5),
    )
    spec, rotated = (
        operators.spec_text(recipe_of({"all": {"rounding": "sr", "hadamard": h}}).fprop.x) for h in (0, 64)
    )
    columns, whole = operators.batch_place(0), operators.WHOLE
    return [
        (blocks.quantize, (x, place, key, spec, "", stream, None, whole, True)),
        (blocks.quantize, (x[:41].bfloat16().t(), columns, key, "", rotated, None, stream, whole, True)),
        (blocks.quantize, (x, place, key, spec, rotated, stream, other, whole, False)),
    ]
