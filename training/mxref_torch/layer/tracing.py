"""What code that a compiler traces does otherwise."""

from __future__ import annotations

import torch


def cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `t` in a type, and `t` itself where it has that type already.

    `t.to(dtype)` gives the same tensor, but the compiler of torch 2.11 takes it for a second one. A traced
    autograd function then returns one tensor as two results, and its gradient is lost: zeros arrive.
    """
    return t if t.dtype is dtype else t.to(dtype)


def is_known(rows: int) -> bool:
    """Return whether a number of rows is not a symbol of the compiler: the shape of a layout must be known."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # has been imported by the compiler

    return has_static_value(rows)
