"""Triton's interpreter without work that decides nothing, which is most of its time.

It changes some hundred functions of `triton.language` before every launch and every call of a device function, and
takes that back after the launch. In a process whose kernels are all interpreted, the change may stay.

It also computes whether each sum of integers overflows, for an assertion that only its debug mode makes.

And it builds the type of each value anew: a shape is checked, counted and written as text for every operation.
Types are never changed, so what depends on the shape alone is built once.

The rules of promotion and the shape that both get are found for each pair of operands, though they depend on their
types alone, and every constant is written to an array of that shape.

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

    def new_member(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, _semantic: Any = None, **named: Any) -> Any:
            return member(*args, _semantic=interpreter.interpreter_semantic, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_lang = once
    interpreter._patch_attr = new_member


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

    def with_element_ty(self: Any, element_ty: Any) -> Any:
        key = self.shape, element_ty.name
        if key not in of_elements:
            of_elements[key] = core.block_type(element_ty, self.shape)
        return of_elements[key]

    of_scalars = parts(())
    of_elements: dict[tuple[Any, ...], Any] = {}
    core.block_type.__init__ = block_type
    core.block_type.with_element_ty = with_element_ty
    core.block_type.to_ir = lambda self, builder: self  # which the interpreter would build anew
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
    """Promote and broadcast operands as it was found before for their types, and make each constant once."""
    semantic, core = interpreter.interpreter_semantic, tl.core
    check: Callable[..., Any] = semantic.binary_op_type_checking_impl
    shaped: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    constants: dict[tuple[Any, ...], Any] = {}

    def spread(value: Any, to: Any) -> Any:
        """Return a scalar or a block with the shape of a type."""
        if to is None:
            return value
        if value.type.is_block():
            return core.tensor(semantic.builder.create_broadcast(value.handle, to.shape), to)
        return core.tensor(semantic.builder.create_splat(to, value.handle), to)

    def checked(lhs: Any, rhs: Any, *how: Any, **named: Any) -> Any:
        if type(lhs) is not core.tensor:
            return check(lhs, rhs, *how, **named)
        if type(rhs) is not core.tensor:
            key = lhs.type.name, type(rhs), repr(rhs), how, *named.items()
            if key in constants:
                return lhs, constants[key]
            out = check(lhs, rhs, *how, **named)
            if out[0] is lhs:
                constants[key] = out[1]
            return out
        key = lhs.type.name, rhs.type.name, how, *named.items()
        if key in shaped:
            left, right = shaped[key]
            return spread(lhs, left), spread(rhs, right)
        out = check(lhs, rhs, *how, **named)
        # Neither was converted, and neither has fewer axes than the other.
        if all(
            new.type.scalar == old.type.scalar
            and (not old.type.is_block() or len(old.type.shape) == len(new.type.shape))
            for old, new in zip((lhs, rhs), out, strict=True)
        ):
            left, right = (None if new is old else new.type for old, new in zip((lhs, rhs), out, strict=True))
            shaped[key] = left, right
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
