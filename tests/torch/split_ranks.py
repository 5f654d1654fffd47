"""Two ranks that share layers, which a test starts: each result is composed of the parts, whose sum is float32."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import apart
from layer_setup import amax_of
from mxref.recipe_files import recipe_from_table
from mxref.roles import OPERANDS, GemmRole
from mxref_torch import convert
from mxref_torch.layer import split

RANKS, TOKENS, INPUTS, OUTPUTS = 2, 37, 192, 128
# Without random bits, which would depend on the place of a part.
RECIPE = recipe_from_table(
    {
        "gemm": "ordered",
        "fprop": {"hadamard": 16, "x": {"format": apart.E4M3}, "w": {"scale_rule": "even"}},
        "dgrad": {"dy": {"format": apart.E5M2, "prescale": True}, "w": {"scale_rule": "rceil"}},
        "wgrad": {"hadamard": 32, "dy": {"scale_rule": "ceil"}, "x": {"format": apart.E4M3, "rounding": "rna"}},
    }
)  # fmt: skip


NVFP4 = recipe_from_table({
    "all": {"format": "nvfp4"}, "fprop": {"w": {"block": "16x16"}}, "wgrad": {"hadamard": 16, "sign_vector": "+-" * 8},
})  # fmt: skip


def rounded(values: Any) -> Any:
    return torch.from_numpy(values).bfloat16()


def check(recipe: Any, rank: int, axis: int, mesh: Any) -> list[str]:
    """Return which results of a layer split along an axis of its weight are not those of its parts."""
    torch.manual_seed(axis)
    x, dy = torch.randn(TOKENS, INPUTS).bfloat16(), torch.randn(TOKENS, OUTPUTS).bfloat16()
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False))
    w = model[0].weight.detach().clone()
    convert(model, recipe, backend="reference")
    layer: Any = model[0]
    split.split_layer("0", layer, axis, mesh)
    x_parts, dy_parts = ([t, t] if axis == whole else list(t.chunk(2, 1)) for whole, t in ((0, x), (1, dy)))
    w_parts = w.chunk(2, axis)
    own = x_parts[rank].clone().requires_grad_()
    y = layer(own)
    y.backward(dy_parts[rank])

    def parts(role: GemmRole, a: Any, b: Any) -> list[Any]:
        both, largest = [[apart.numbers(t) for t in each] for each in (a, b)], [None, None]
        if recipe is NVFP4:
            triples = zip(both, recipe.operands(role), OPERANDS[role], strict=True)
            largest = [
                np.max([amax_of(t, spec, operand.axis) for t in own], axis=0)
                for own, spec, operand in triples
            ]
        return [
            apart.product(recipe, role, *each, 0, 0, 0, "float32", largest)
            for each in zip(*both, strict=True)
        ]

    outputs = parts(GemmRole.FPROP, x_parts, w_parts)
    gradients = parts(GemmRole.DGRAD, dy_parts, w_parts)
    want = {
        "Y": rounded(outputs[0] + outputs[1] if axis == 1 else outputs[rank]),
        "dX": rounded(gradients[0] + gradients[1] if axis == 0 else gradients[rank]),
        "dW": torch.from_numpy(parts(GemmRole.WGRAD, dy_parts, x_parts)[rank]),
    }
    got = {"Y": y.detach(), "dX": own.grad, "dW": layer.weight.grad.to_local()}
    return [name for name in want if not np.array_equal(got[name].float(), want[name].float())]


def main(rank: int, store: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    right = split._reduced
    for how in ("float32", "bfloat16"):
        split._reduced = lambda t, *given: right(t.to(getattr(torch, how)), *given).float()  # noqa: B023
        wrong = [check(RECIPE, rank, axis, mesh) for axis in (0, 1)]
        print(rank, f"sums in {how}: wrong are {wrong}", flush=True)
    split._reduced = right
    print(rank, f"nvfp4: wrong are {[check(NVFP4, rank, axis, mesh) for axis in (0, 1)]}", flush=True)
    split.TensorSplit.largest = lambda split, amax: amax
    faults = [bool(check(NVFP4, rank, axis, mesh)) for axis in (0, 1)]
    print(rank, f"each its own amax: wrong is something {faults}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
