"""Kernel libraries, by the code that they run without a GPU: fouroversix in PyTorch, AMD Quark in C++."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from mxref import OperandSpec
from mxref.formats import BLOCK_FORMATS, E2M1, MXFP4, NVFP4, BlockFormat
from mxref.layouts.packed import unpack
from peers.blocks import Case, Stored, tensor


def fouroversix(x: np.ndarray, made: BlockFormat, bfloat16: bool, rule: str) -> Stored:
    """Its code for PyTorch, which stores the largest magnitude of a tensor and no scale of it."""
    import torch
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4
    from fouroversix.utils import DataType, ScaleRule

    packed, scales, _ = quantize_to_fp4(
        tensor(x, bfloat16), fp4_format=DataType(made.name), scale_rule=ScaleRule(rule),
        use_blackwell_scale_layout=False,
    )  # fmt: skip
    return Stored(scales.view(torch.uint8).numpy().reshape(len(x), -1), unpack(packed.numpy(), E2M1))


def quark(x: np.ndarray, made: BlockFormat, bfloat16: bool) -> Stored:
    """Values alone, under the default rule: its emulation of hardware returns what the numbers become.

    Under its other rules a scale may lie below those of E8M0, which the values do not show.
    """
    import torch
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx

    name = "fp4" if made is MXFP4 else f"fp{made.element.bits}_{made.element.name.lower()}"
    values = fake_quantize_mx(
        tensor(x, bfloat16), axis=-1, block_size=32, scale_calculation_mode="even", mx_element_dtype=name
    )
    return Stored(None, None, values=values.to(torch.float32).numpy())


def cases() -> Iterator[Case]:
    """Yield what is run."""
    for name, narrow in {"float32": False, "bfloat16": True}.items():
        for spec, rule in (
            (OperandSpec(MXFP4, scale_rule="rceil"), "static_6"),
            (OperandSpec(NVFP4, arithmetic="te_2_13"), "static_6"),
            (OperandSpec(NVFP4, four_over_six="absolute"), "mae"),
            (OperandSpec(NVFP4, four_over_six="squared"), "mse"),
            (OperandSpec(NVFP4, four_over_six="largest"), "abs_max"),
        ):  # fmt: skip
            run = partial(fouroversix, made=spec.format, bfloat16=narrow, rule=rule)
            yield Case("fouroversix", f"{rule}, {name}", run, spec, narrow)
        for made in (BLOCK_FORMATS[name] for name in ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2")):
            run = partial(quark, made=made, bfloat16=narrow)
            yield Case("amd-quark", f"even, {name}", run, OperandSpec(made, scale_rule="even"), narrow)
