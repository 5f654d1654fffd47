"""Models that a step of ours is measured against: plain linear layers in BF16, and torchao's FP8."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn
from torch.nn import functional as F

from mxref_training.model.llama import Llama

PLAIN, TORCHAO = "plain", "torchao-fp8"
PEERS = (PLAIN, TORCHAO)


class PlainLinear(nn.Linear):
    """A linear layer with float32 master weights that computes in the type of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def make_linear(model: Llama, name: str = "") -> None:
    """Replace the linear layers of a model, whatever they are, by torch's own or a peer's, which hold the same weights.

    As our recipes do, torchao leaves the last layer in BF16.
    """
    for parent in list(model.modules()):
        for child, linear in list(parent._modules.items()):
            if isinstance(linear, nn.Linear):
                computes_bf16 = name == PLAIN or (name == TORCHAO and child == "lm_head")
                kind = PlainLinear if computes_bf16 else nn.Linear
                with torch.device("meta"):
                    made = kind(linear.in_features, linear.out_features, bias=False)
                made.weight = linear.weight
                setattr(parent, child, made)
    if name == TORCHAO:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda _, path: path != "lm_head")
