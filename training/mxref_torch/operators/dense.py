"""The operator of the GEMMs of BF16 and FP8, counted where it runs.

Which product of PyTorch is called decides bits, on each device its own.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from mxref.formats import BF16, FP8
from mxref_torch.operators import count, operator


@lru_cache(maxsize=4)
def _values(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of the 256 codes of an FP8 type, float32."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def _decode(q: torch.Tensor) -> torch.Tensor:
    """Return FP8 as float32 by a table: several times faster than torch's own cast of E4M3 on a CPU."""
    codes = q.contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
    return _values(q.dtype).index_select(0, codes).view(q.shape)


def _empty(a: torch.Tensor, b: torch.Tensor, a_inverse: torch.Tensor | None = None) -> torch.Tensor:
    narrow = a.dtype is torch.bfloat16 or a_inverse is not None
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16 if narrow else torch.float32)


@operator(like=_empty)
def dense_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    role: str,
    tally: torch.Tensor | None = None,
    a_inverse: torch.Tensor | None = None,
    b_inverse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return A B^T [M, N] of two BF16 or two FP8 operands, accumulated in float32, and count it.

    A Hopper multiplies FP8 operands by its FP8 matrix units without fast accumulation, within the error class
    `fp8-hopper`. Elsewhere they are decoded and multiplied without rounding: their values have at most 4 significant
    bits, which every matrix unit multiplies exactly. The product is multiplied by both inverses, fl32(1 / scale) of A
    and B as float32 scalars, if they are given. `role` and `tally` are as in `blocks.scaled_gemm`.

    The result is bfloat16 (rounded once) from BF16 operands, and from FP8 where the inverses are given; else float32.
    """
    if a.dtype is torch.bfloat16:
        if a.device.type == "cpu" and _widens():
            out = (a.to(torch.float32) @ b.to(torch.float32).T).to(torch.bfloat16)
        else:
            out = a @ b.T
        count(tally, role, (BF16, BF16), *a.shape)
        return out
    if a.device.type == "cpu":
        # Torch's CPU has no BF16 product with float32 output, and its _scaled_mm is twice as slow as this.
        out = _decode(a) @ _decode(b).T
    elif _multiplies_fp8(a, b):
        out = _by_fp8_units(a, b, a_inverse, b_inverse)
    else:
        out = torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16).T, out_dtype=torch.float32)
    if a_inverse is not None and b_inverse is not None and out.dtype is not torch.bfloat16:
        out = (out * a_inverse * b_inverse).to(torch.bfloat16)
    count(tally, role, (FP8, FP8), *a.shape)
    return out


def _multiplies_fp8(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the GPU's FP8 units multiply two operands."""
    whole = a.shape[0] > 0 and b.shape[0] > 0 and a.shape[1] > 0
    aligned = b.shape[0] % 16 == 0 and a.shape[1] % 16 == 0  # cuBLAS needs it of N and K
    pair = torch.float8_e4m3fn in (a.dtype, b.dtype)  # cuBLAS has no product of two E5M2
    return whole and aligned and pair and _is_hopper(a.device)


@cache
def _widens() -> bool:
    """Return whether float32 is the faster way to a BF16 product: without AVX-512, torch has no vector code for it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def _by_fp8_units(
    a: torch.Tensor, b: torch.Tensor, a_inverse: torch.Tensor | None, b_inverse: torch.Tensor | None
) -> torch.Tensor:
    """Return A B^T times the inverses in bfloat16, or without them in float32.

    cuBLAS multiplies by both scales at once: rounded to bfloat16 a result of the error class, in float32 none of it.
    """
    dtype = torch.bfloat16
    if a_inverse is None or b_inverse is None:
        dtype, a_inverse, b_inverse = torch.float32, _one(a.device), _one(a.device)
    return torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype,
        use_fast_accum=False,
    )  # fmt: skip
