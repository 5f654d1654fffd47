"""Triton's interpreter without work that decides nothing, which is most of its time.

It changes some hundred functions of `triton.language` before every launch and every call of a device function, and
takes that back after the launch. In a process whose kernels are all interpreted, the change may stay.

It also computes whether each sum of integers overflows, for an assertion that only its debug mode makes.

And it builds the type of each value anew: a shape is checked, counted and written as text for every operation.
Types are never changed, so what depends on the shape alone is built once.

The rules of promotion are applied to each pair of operands, though they depend on their types alone.

A reduction by a function of its own calls it for each element; here once for each place along the axis.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class _Kept:
    """What a launch gives back at its end: nothing."""

    def restore(self) -> None:
        pass


def install() -> None:
    """Change the language once for this process, compute no overflows, and build what a type needs once."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    _change_language_once()
    _keep_shapes()
    _keep_dtypes()
    _keep_promotions()
    _reduce_by_slices()


def _change_language_once() -> None:
    change: Callable[[Any], Any] = interpreter._patch_lang
    changed: set[str] = set()
    seen: set[Any] = set()

    def once(fn: Any) -> _Kept:
        if fn not in seen:
            names = {
                m.__name__ for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)
            }
            if not names <= changed:
                change(fn)
                changed.update(names)
            seen.add(fn)
        return _Kept()

    interpreter._patch_lang = once


def _keep_shapes() -> None:
    """Check, count and write a shape once, and not for each type and each value that has it."""
    core = tl.core
    build = core.block_type.__init__
    kept: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def parts(shape: Any) -> tuple[Any, Any]:
        """Return what a value has beside its type: the number of its elements and its shape."""
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if sizes not in kept:
            build(self, element_ty, shape)
            kept[sizes] = self.shape, self.numel, f"<{self.shape}, ", parts(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, begin, self.of_values = kept[sizes]
        self.name = f"{begin}{element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_values if type.is_block() else of_scalars

    of_scalars = parts(())
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor


def _keep_dtypes() -> None:
    """Look up NumPy's dtype of a type once."""
    find: Callable[[Any], Any] = interpreter._get_np_dtype
    kept: dict[str, Any] = {}

    def by_name(type: Any) -> Any:
        if type.name not in kept:
            kept[type.name] = find(type)
        return kept[type.name]

    interpreter._get_np_dtype = by_name


def _keep_promotions() -> None:
    """Take two operands of one type as they are, if they were taken so before."""
    semantic = interpreter.interpreter_semantic
    check: Callable[..., Any] = semantic.binary_op_type_checking_impl
    kept: set[tuple[Any, ...]] = set()

    def checked(lhs: Any, rhs: Any, *how: Any, **named: Any) -> Any:
        if type(lhs) is not tl.core.tensor or type(rhs) is not tl.core.tensor:
            return check(lhs, rhs, *how, **named)
        key = lhs.type.name, rhs.type.name, how, *named.values()
        if key in kept:
            return lhs, rhs
        out = check(lhs, rhs, *how, **named)
        if out[0] is lhs and out[1] is rhs:
            kept.add(key)
        return out

    semantic.binary_op_type_checking_impl = checked


def _reduce_by_slices() -> None:
    """Combine whole slices along the axis, in the order in which the interpreter combines elements."""

    def reduce(self: Any, input: Any) -> Any:
        assert self.axis is not None
        data = [np.moveaxis(x.handle.data, self.axis, 0) for x in input]
        out = tuple(self.to_tensor(d[0], x.dtype) for d, x in zip(data, input, strict=True))
        for i in range(1, len(data[0])):
            others = (self.to_tensor(d[i], x.dtype) for d, x in zip(data, input, strict=True))
            found = self.combine_fn.fn(*out, *others)
            out = found if isinstance(found, tuple) else (found,)
        if self.keep_dims:
            out = tuple(self.to_tensor(np.expand_dims(o.handle.data, self.axis), o.dtype) for o in out)
        return out

    interpreter.ReduceOps.generic_reduce = reduce
