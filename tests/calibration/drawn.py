"""Synthetic checkpoints: weights of many shapes, quantized by a rule that is known, in files of several conventions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

import quantized_files
from mxref import MXFP4, NVFP4, MXArray
from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.identify.evidence import named_rules
from mxref.layouts.packed import pack, unpack
from mxref.quantization import quantize
from mxref.recipe import OperandSpec
from mxref.steps.four_over_six import FourOverSix, choose
from mxref.steps.hadamard import Rotation, hadamard
from mxref.steps.quotient import NO_TENSOR_SCALE, TensorScale, quotient, scale_code_of_quotient, tensor_scale
from mxref.steps.rounding import Rounding, round_magnitude
from mxref.steps.scale import EXPONENT_RULES, ScaleRule, scale_code, scale_value

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
NAMELESS = ("smaller error", "between rceil and even", "between even and floor", "nearest power of two")
"""Ways to choose a scale that no name belongs to: an answer with a name is wrong."""
FILES = ("compressed-tensors", "quark", "gpt-oss", "mxref", "gguf")


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape)


def _columns(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return _normal(rng, shape) * np.exp(rng.normal(0, rng.uniform(0.1, 0.8), (1, shape[1])))


def _heavy(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_t(rng.choice([2.2, 2.5, 3, 4, 6, 10]), shape)


def _outliers(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    x = _normal(rng, shape)
    x[:, rng.integers(shape[1], size=shape[1] // 50 + 1)] *= rng.uniform(3, 20)
    return x


def _rotated(size: int) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        before = (_heavy, _columns, _outliers)[rng.integers(3)](rng, shape).astype(np.float32)
        return hadamard(before, Rotation(size)).astype(np.float64)

    return draw


def _pruned(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    x = (_normal, _heavy, _columns)[rng.integers(3)](rng, shape)
    x[rng.random(shape) < rng.uniform(0.2, 0.9)] = 0
    return x


def _smallest_pruned(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    x = _normal(rng, shape)
    x[np.abs(x) < np.quantile(np.abs(x), rng.uniform(0.2, 0.8))] = 0
    return x


def _two_of_four(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    x = _normal(rng, shape).reshape(-1, 4)
    np.put_along_axis(x, np.argsort(np.abs(x), axis=1)[:, :2], 0, axis=1)
    return x.reshape(shape)


def _power(beta: float) -> Draw:
    return lambda rng, shape: rng.choice([-1, 1], shape) * rng.gamma(1 / beta, 1, shape) ** (1 / beta)


def _mixed(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.where(rng.random(shape) < rng.uniform(0.02, 0.3), rng.uniform(2, 6), 1) * _normal(rng, shape)


def _two_matrices(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    half = shape[0] // 2
    return np.concatenate([_normal(rng, (half, shape[1])), 3 * _heavy(rng, (shape[0] - half, shape[1]))])


def _low_rank(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return 0.4 * _normal(rng, (shape[0], 6)) @ _normal(rng, (6, shape[1])) + _normal(rng, shape)


def _coarse(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Weights that were INT8 with a scale for each row."""
    x = _normal(rng, shape)
    step = np.abs(x).max(axis=1, keepdims=True) / 127
    return np.round(x / step) * step


KINDS: dict[str, Draw] = {
    "normal": _normal,
    "normal in bfloat16": lambda rng, shape: (
        (0.02 * _normal(rng, shape)).astype(ml_dtypes.bfloat16).astype(float)
    ),
    "heavy tails": _heavy,
    "Laplace": lambda rng, shape: rng.laplace(size=shape),
    "between normal and Laplace": _power(1.4),
    "light tails": _power(3),
    "columns of unlike size": _columns,
    "outlier columns": _outliers,
    "mixtures": _mixed,
    "two matrices": _two_matrices,
    "low rank and noise": _low_rank,
    "rotated by 16": _rotated(16),
    "rotated by 32": _rotated(32),
    "rotated by 128": _rotated(128),
    "pruned at random": _pruned,
    "pruned by size": _smallest_pruned,
    "two of four pruned": _two_of_four,
    "INT8 before": _coarse,
    "clipped": lambda rng, shape: np.clip(_normal(rng, shape), -2, 2),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "GPTQ-like": _normal,
    "GPTQ-like, heavy tails": _heavy,
}


@dataclass(frozen=True)
class Drawn:
    """A checkpoint, and what is known about it."""

    path: Path
    kind: str
    made: BlockFormat
    rule: str
    """A rule's name, or one of `NAMELESS`."""
    blocks: int
    files: str
    alike: dict[str, float]
    """The share of the scale bytes that each rule with a name gives; of GPTQ, whose scales see other weights, none."""


def draw(folder: Path, seed: int, number: int) -> Drawn:
    """Write a checkpoint into a folder and return what is known about it."""
    rng = np.random.default_rng([seed, number])
    kind = str(rng.choice(list(KINDS)))
    files = str(rng.choice(FILES))
    names = ("mxfp4", "nvfp4") if files in ("gguf", "gpt-oss") else tuple(BLOCK_FORMATS)
    made = MXFP4 if rng.random() < 0.55 or files == "gpt-oss" else BLOCK_FORMATS[str(rng.choice(names))]
    if files == "quark" and made.name not in ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2"):
        files = "mxref"
    if files == "compressed-tensors" and made.name not in ("mxfp4", "nvfp4", "mxfp8_e4m3"):
        files = "mxref"
    length = int(rng.choice([128, 512, 1024, 2048]))
    blocks = int(rng.choice([1024, 4096, 8192, 16384]))
    shape = (max(2, blocks * made.k // length), length)
    if kind.startswith("GPTQ"):
        shape = (max(2, blocks * made.k // 512), 512)
    if made.tensor_scale:
        rule = str(rng.choice(["nearest", "nearest", "four_over_six", "four_over_six", "smaller error"]))
    else:
        rule = str(rng.choice([*["floor", "ceil", "rceil", "even"] * 2, *NAMELESS]))
    x = KINDS[kind](rng, shape)
    if rng.integers(2):  # rows of unlike size
        x = x * np.exp(rng.normal(0, rng.uniform(0.1, 1.0), (shape[0], 1)))
    x = (x * 0.02 * np.exp2(rng.uniform(0, 1))).astype(np.float32)
    codes, scales, t = _gptq(x, made, rule, rng) if kind.startswith("GPTQ") else _quantized(x, made, rule)
    path = _written(folder / f"{number}", files, made, codes, scales, t)
    alike = {}
    if made.scale.powers and not kind.startswith("GPTQ"):
        named = (r.value for r in EXPONENT_RULES)
        alike = {name: float((_scales(x, made, name, t) == scales).mean()) for name in named}
    return Drawn(path, kind, made, rule, scales.size, files, alike)


# ---- quantization ----


def _quantized(x: np.ndarray, made: BlockFormat, rule: str) -> tuple[np.ndarray, np.ndarray, TensorScale]:
    """Return codes [rows, K], scale bytes [rows, K / k] and the tensor's scale."""
    t = tensor_scale(np.float32(np.abs(x).max()), made) if made.tensor_scale else NO_TENSOR_SCALE
    if rule == "four_over_six":
        t = tensor_scale(t.amax, made, top=256.0)
    scales = _scales(x, made, rule, t)
    return _codes(x, scales, made, t), scales, t


def _codes(x: np.ndarray, scales: np.ndarray, made: BlockFormat, t: TensorScale) -> np.ndarray:
    magnitude = np.abs(x)
    v = quotient(magnitude, np.repeat(scales, made.k, axis=-1), made, t)
    codes = round_magnitude(v, Rounding.RNE, made.element)
    if made.name == "mxint8":
        return np.where(x < 0, -codes, codes).astype(np.uint8)
    return codes | np.where(np.signbit(x), np.uint8(made.element.sign), np.uint8(0))


def _scales(x: np.ndarray, made: BlockFormat, rule: str, t: TensorScale) -> np.ndarray:
    amax = np.abs(x).reshape(len(x), -1, made.k).max(axis=-1)
    if made.tensor_scale:
        six, four = (scale_code_of_quotient(amax, made, t, largest=m) for m in (6.0, 4.0))
        if rule == "nearest":
            return six
        if rule == "four_over_six":
            return choose(np.abs(x), six, four, made, t, FourOverSix.SQUARED, 1)
        near = [np.clip(six.astype(int) + d, 1, 126).astype(np.uint8) for d in range(-3, 4)]
        return _smallest_error(x, near, made, t)
    bits = amax.view(np.uint32)
    if rule == "smaller error":
        return _smallest_error(
            x, [scale_code(bits, r, made.element) for r in (ScaleRule.FLOOR, ScaleRule.CEIL)], made, t
        )
    if rule == "nearest power of two":
        larger = (amax * np.float32(np.sqrt(2) / made.element.max_value * 2**made.element.max_exponent)).view(
            np.uint32
        )
        return scale_code(larger, ScaleRule.FLOOR, made.element)
    if rule.startswith("between"):
        ends = [c for (c,), name in named_rules(made.element).items() if name in rule.split()]
        rule = f">={sum(ends) / 2:.20f}"
    return scale_code(bits, ScaleRule(rule), made.element)


def _smallest_error(x: np.ndarray, tried: list[np.ndarray], made: BlockFormat, t: TensorScale) -> np.ndarray:
    errors = []
    for scales in tried:
        values = np.array(made.element.values)[_codes(x, scales, made, t)]
        values = values * np.repeat(scale_value(scales, made.scale), made.k, axis=-1) * float(t.scale)
        errors.append(((values - x) ** 2).reshape(*scales.shape, made.k).sum(axis=-1))
    return np.choose(np.argmin(errors, axis=0), tried).astype(np.uint8)


def _gptq(
    x: np.ndarray, made: BlockFormat, rule: str, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, TensorScale]:
    """Quantize column by column; the error of each is made good by the columns after it, as GPTQ does."""
    rows, length = x.shape
    mixing = np.eye(length) + rng.uniform(0.1, 1.5) * _normal(rng, (length, length)) / np.sqrt(length)
    inputs = _normal(rng, (2 * length, length)) @ mixing * np.exp(rng.normal(0, 0.5, length))
    hessian = inputs.T @ inputs / len(inputs)
    hessian += 0.01 * np.mean(np.diag(hessian)) * np.eye(length)
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    _, _, t = _quantized(x, made, rule)
    left, codes = x.astype(np.float64), np.empty((rows, length), np.uint8)
    scales = np.empty((rows, length // made.k), np.uint8)
    for start in range(0, length, made.k):
        here = slice(start, start + made.k)
        block = np.ascontiguousarray(left[:, here].astype(np.float32))
        scales[:, start // made.k] = _scales(block, made, rule, t)[:, 0]
        one = scales[:, start // made.k : start // made.k + 1]
        step = scale_value(one, made.scale)[:, 0] * float(t.scale)
        for i in range(start, start + made.k):
            column = np.repeat(left[:, i : i + 1], made.k, axis=1).astype(np.float32)
            codes[:, i] = _codes(column, one, made, t)[:, 0]
            error = (left[:, i] - np.array(made.element.values)[codes[:, i]] * step) / upper[i, i]
            left[:, i + 1 :] -= np.outer(error, upper[i, i + 1 :])
    return codes, scales, t


# ---- files ----


def _written(
    folder: Path, files: str, made: BlockFormat, codes: np.ndarray, scales: np.ndarray, t: TensorScale
) -> Path:
    folder.mkdir()
    packed, layer = pack(codes, made.element), "model.layers.0.mlp.up_proj"
    path = folder / "model.safetensors"
    if files == "mxref":
        scale = np.array([t.scale]) if made.tensor_scale else None
        MXArray(packed, scales, codes.shape, 1, format=made, tensor_scale=scale).save(folder / "w.npz")
        return folder / "w.npz"
    if files == "gguf":
        raw = quantized_files.gguf_blocks(codes, scales, made.k)
        return quantized_files.gguf(
            folder / "m.gguf", {"blk.0.ffn_up.weight": (made.name.upper(), codes.shape, raw)}
        )
    if files == "gpt-oss":
        shape = (1, len(codes), scales.shape[1])
        return quantized_files.safetensors(
            path,
            {
                f"{layer}_blocks": ("U8", packed.reshape(*shape, made.k // 2)),
                f"{layer}_scales": ("U8", scales.reshape(shape)),
            },
        )
    if files == "quark":
        named = {"weight": ("U8", packed), "weight_scale": ("U8", scales)}
    elif made.element.bits == 8:
        named = {"weight": ("F8_E4M3", packed), "weight_scale": ("U8", scales)}
    else:
        named = {
            "weight_packed": ("U8", packed),
            "weight_scale": ("F8_E4M3" if made is NVFP4 else "U8", scales),
        }
        if made.tensor_scale:
            named["weight_global_scale"] = ("F32", np.array([1 / t.scale], np.float32))
    return quantized_files.safetensors(path, {f"{layer}.{name}": entry for name, entry in named.items()})


def same_as_reference() -> bool:
    """Return whether the codes that are drawn here are those of `mxref.quantize`, for each format and named rule."""
    x = (_normal(np.random.default_rng(5), (8, 256)) * 0.02).astype(np.float32)
    for made in BLOCK_FORMATS.values():
        rules = ("nearest", "four_over_six") if made.tensor_scale else ("floor", "ceil", "rceil", "even")
        for rule in rules:
            chosen = {"four_over_six": "squared"} if rule == "four_over_six" else {"scale_rule": rule}
            want = quantize(x, OperandSpec(made, **chosen))
            codes, scales, _ = _quantized(x, made, rule)
            if (scales != want.scales).any() or (codes != unpack(want.codes, made.element)).any():
                return False
    return True
