"""The forward pass of Llama 3 in float64, written from the papers with NumPy only, for numerical gradients.

Touvron et al. 2023 (pre-norm decoder), Su et al. 2021 (rotary embedding, in the half-split form of Transformers),
Shazeer 2020 (SwiGLU), Ainslie et al. 2023 (grouped key-value heads), Zhang and Sennrich 2019 (RMSNorm).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from training_oracle.layer import Array, Arrays, token_losses


@dataclass(frozen=True)
class Shape:
    """What the weights do not say."""

    layers: int
    heads: int
    kv_heads: int
    theta: float
    eps: float


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


@cache
def _turns(positions: int, half: int, theta: float) -> Array:
    angle = np.arange(positions)[:, None] * theta ** (-np.arange(half) / half)
    return np.exp(1j * angle)


@cache
def _later(positions: int) -> tuple[Array, ...]:
    """Where a position would read a later one."""
    return np.triu_indices(positions, 1)


def _rotate(x: Array, theta: float) -> Array:
    """x [..., T, E]: channel i and channel i + E / 2 are a point of the plane, turned by position * theta^(-2i / E)."""
    half = x.shape[-1] // 2
    point = (x[..., :half] + 1j * x[..., half:]) * _turns(x.shape[-2], half, theta)
    return np.concatenate([point.real, point.imag], axis=-1)


def _attention(q: Array, k: Array, v: Array) -> Array:
    """Each head by itself, [..., T, E] each: position t reads positions 0 to t."""
    score = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    score[..., *_later(q.shape[-2])] = -np.inf
    p = np.exp(score - score.max(axis=-1, keepdims=True))
    return p @ v / p.sum(axis=-1, keepdims=True)


def logits(weights: Arrays, inputs: list[list[int]], shape: Shape) -> Array:
    """Logits float64 [B, T, V] of tokens [B][T]; `lm_head.weight` is absent where it is tied."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    embedding = w["model.embed_tokens.weight"]
    head = w.get("lm_head.weight", embedding)
    return _hidden(w, embedding[np.array(inputs)], shape) @ head.T


def _hidden(w: Arrays, x: Array, shape: Shape) -> Array:
    """x [B, T, width], of the embedding and behind all layers."""
    size = x.shape[-1] // shape.heads
    shared = shape.heads // shape.kv_heads  # query heads that read one key-value head
    for number in range(shape.layers):
        p = f"model.layers.{number}."
        h = _norm(x, w[p + "input_layernorm.weight"], shape.eps)
        # [B, heads, T, size] each
        q, k, v = (
            (h @ w[f"{p}self_attn.{which}_proj.weight"].T).reshape(*x.shape[:2], -1, size).swapaxes(1, 2)
            for which in "qkv"
        )
        k, v = (np.repeat(part, shared, axis=1) for part in (_rotate(k, shape.theta), v))
        heads = _attention(_rotate(q, shape.theta), k, v)
        x = x + heads.swapaxes(1, 2).reshape(x.shape) @ w[p + "self_attn.o_proj.weight"].T
        h = _norm(x, w[p + "post_attention_layernorm.weight"], shape.eps)
        gate, up = (h @ w[f"{p}mlp.{which}_proj.weight"].T for which in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    return _norm(x, w["model.norm.weight"], shape.eps)


def loss(weights: Arrays, inputs: list[list[int]], targets: list[list[int]], shape: Shape) -> float:
    """Mean loss per token."""
    return float(token_losses(logits(weights, inputs, shape), np.array(targets)).mean())


def slope(
    weights: Arrays, name: str, direction: Array, batch: tuple[list[list[int]], list[list[int]]], shape: Shape
) -> float:
    """Derivative of the loss along a direction of one parameter, by a central difference."""
    # Length 1e-3: the error of the difference is then of the order 1e-6 of the slope, that of rounding 1e-12.
    unit = 1e-3 * direction.astype(np.float64) / np.linalg.norm(direction)
    ends = (loss(weights | {name: weights[name] + sign * unit}, *batch, shape) for sign in (1, -1))
    above, below = ends
    return (above - below) / 2e-3
