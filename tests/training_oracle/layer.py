"""A training step in float64 or exact arithmetic, written from the documentation with NumPy only.

It shares no code with `mxref` or `mxref_training`, and works on the recorded values of a run: its inputs, logits,
gradients and weights. Sources: Loshchilov and Hutter 2019, algorithm 2 (AdamW); Pascanu et al. 2013 (clipping);
Salmon et al. 2011 (Philox); the clauses `fp8.*`; the section "The order of the data" of docs/reference/training.rst.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = dict[str, Array]

# ---- the order of the data ----

_MASK = (1 << 64) - 1


def philox4x64(counter: int, key: tuple[int, int]) -> list[int]:
    """Ten rounds over the counter (counter, 0, 0, 0)."""
    c, (k0, k1) = [counter, 0, 0, 0], key
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(p1 >> 64) ^ c[1] ^ k0, p1 & _MASK, (p0 >> 64) ^ c[3] ^ k1, p0 & _MASK]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _MASK, (k1 + 0xBB67AE8584CAA73B) & _MASK
    return c


@cache
def window_starts(tokens: int, seq_len: int, seed: int, epoch: int) -> list[int]:
    """First token of each window of an epoch, in the order of use; every sample of the epoch asks for them."""
    windows, spare = divmod(tokens - 1, seq_len)
    words = [word for c in range(1, 2 + windows // 4) for word in philox4x64(c, (seed, epoch))]
    shift = words[0] % (spare + 1)
    order = sorted(range(windows), key=lambda window: words[1 + window])
    return [shift + window * seq_len for window in order]


def training_batch(
    tokens: Array, seq_len: int, seed: int, batch: int, step: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Inputs and targets of an optimizer step, [batch][seq_len] each."""
    inputs, targets = [], []
    for sample in range(step * batch, (step + 1) * batch):
        epoch, place = divmod(sample, (len(tokens) - 1) // seq_len)
        start = window_starts(len(tokens), seq_len, seed, epoch)[place]
        inputs.append([int(tokens[start + i]) for i in range(seq_len)])
        targets.append([int(tokens[start + i + 1]) for i in range(seq_len)])
    return inputs, targets


def validation_windows(tokens: Array, seq_len: int, limit: int) -> tuple[list[list[int]], list[list[int]]]:
    """Inputs and targets of an evaluation: whole windows from the first token on, at most `limit` targets."""
    count = min(len(tokens) - 1, limit) // seq_len
    starts = [seq_len * i for i in range(count)]
    return (
        [[int(t) for t in tokens[s : s + seq_len]] for s in starts],
        [[int(t) for t in tokens[s + 1 : s + 1 + seq_len]] for s in starts],
    )


# ---- the loss ----


def token_losses(logits: Array, targets: Array) -> Array:
    """-log softmax at the target, float64 [...]; logits [..., V]."""
    x = logits.astype(np.float64)
    top = x.max(axis=-1, keepdims=True)
    total = top[..., 0] + np.log(np.exp(x - top).sum(axis=-1))
    return total - np.take_along_axis(x, np.asarray(targets)[..., None], axis=-1)[..., 0]


def logit_gradient(logits: Array, targets: Array, tokens: int) -> Array:
    """Gradient at the logits of a loss that is the mean over `tokens`."""
    x = logits.astype(np.float64)
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return (p - np.eye(x.shape[-1])[np.asarray(targets)]) / tokens


# ---- the optimizer ----


def learning_rate(
    step: int,
    *,
    lr: float,
    warmup: int,
    schedule: str,
    min_lr_ratio: float,
    end: int,
    start: int | None = None,
) -> float:
    """Rate of an optimizer step, counted from 0: linear warm-up, then the schedule, whose decay ends at `end`."""
    if step < warmup:
        return lr * ((step + 1) / warmup)
    if schedule == "constant":
        return lr
    if schedule in ("linear", "wsd"):
        left = (end - step) / (end - (warmup if start is None else start))
        return lr * min(1.0, max(0.0, left))
    floor = min_lr_ratio * lr
    if step >= end:
        return floor
    angle = math.pi * (step - warmup) / (end - warmup)
    return floor + (lr - floor) * math.cos(angle / 2) ** 2  # (1 + cos a) / 2 = cos^2(a / 2)


def global_norm(gradients: Arrays) -> float:
    """Root of the sum of all squares of all gradients."""
    return math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))


def clip_factor(norm: float, limit: float) -> float:
    """What every gradient is multiplied by; a limit of 0 never clips."""
    return limit / norm if 0 < limit < norm else 1.0


@dataclass
class AdamW:
    """Moments of all parameters, and the update that they give."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    steps: int = 0
    first: Arrays = field(default_factory=dict)
    second: Arrays = field(default_factory=dict)
    largest: Arrays = field(default_factory=dict)
    """Largest magnitude of each element's gradients so far: what float32's rounding of the moments scales with."""

    def step(self, weights: Arrays, gradients: Arrays, lr: float) -> Arrays:
        """New weights from old ones and clipped gradients, float64."""
        self.steps += 1
        out = {}
        for name, gradient in gradients.items():
            g, w = gradient.astype(np.float64), weights[name].astype(np.float64)
            m = self.beta1 * self.first.get(name, 0.0) + (1 - self.beta1) * g
            v = self.beta2 * self.second.get(name, 0.0) + (1 - self.beta2) * g * g
            self.first[name], self.second[name] = m, v
            self.largest[name] = np.maximum(self.largest.get(name, 0.0), np.abs(g))
            corrected = m / (1 - self.beta1**self.steps)
            root = np.sqrt(v / (1 - self.beta2**self.steps))
            decay = 0.0 if is_norm(name) else self.weight_decay
            out[name] = w - lr * decay * w - lr * corrected / (root + self.eps)
        return out


def is_norm(name: str) -> bool:
    """Whether a parameter is a norm's weight: these alone do not decay."""
    return name.endswith(("layernorm.weight", "norm.weight"))


# ---- FP8 under delayed scaling ----

FP8_MAX = {"x": 448.0, "w": 448.0, "dy": 57344.0}
_FP8_TYPES = {"x": ml_dtypes.float8_e4m3fn, "w": ml_dtypes.float8_e4m3fn, "dy": ml_dtypes.float8_e5m2}


def amax(x: Array) -> np.float32:
    """Largest magnitude, NaN if any element is."""
    return np.float32(np.abs(x.astype(np.float32)).max(initial=0.0))


def fp8_values(x: Array, scale: np.float32, tensor: str) -> Array:
    """Values of `x` in FP8, still times its scale, float64."""
    limit = FP8_MAX[tensor]
    scaled = np.clip(x.astype(np.float32) * scale, -limit, limit)
    return scaled.astype(_FP8_TYPES[tensor]).astype(np.float64)


@dataclass
class Fp8History:
    """The scale of one tensor from step to step."""

    tensor: str
    scale: np.float32 | None = None
    """None before any history."""

    def in_force(self, own: np.float32) -> np.float32:
        """Scale of a micro-batch whose amax is `own`."""
        return self.scale if self.scale is not None else self._of(own, np.float32(1))

    def advance(self, amaxes: list[np.float32]) -> None:
        """Close a step that saw micro-batches of these amaxes, or none."""
        if amaxes:
            before = np.float32(1) if self.scale is None else self.scale
            seen = np.float32(np.nan) if any(np.isnan(a) for a in amaxes) else max(amaxes)
            self.scale = self._of(seen, before)

    def _of(self, seen: np.float32, before: np.float32) -> np.float32:
        if seen == 0 or not np.isfinite(seen):
            return before
        with np.errstate(over="ignore"):
            scale = np.float32(FP8_MAX[self.tensor]) / seen
        return np.minimum(scale, np.finfo(np.float32).max)
