"""How a function becomes a kernel."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("numba")

from numba.core import errors
from numba.core.caching import NullCache
from numba.extending import intrinsic

from mxref_numba import kernels


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_kernel_is_compiled(
    monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    monkeypatch.setattr(kernels, "KERNELS", [])
    monkeypatch.setattr(kernels, "kernel_cache", lambda *_: NullCache())

    seen: list[bool] = []

    @intrinsic
    def look(typingctx: Any, value: Any) -> Any:
        seen.append(gc.isenabled())
        return value(value), lambda context, builder, signature, arguments: arguments[0]

    @kernels.Native
    def works(x: Any) -> Any:
        look(x)

    @kernels.Native
    def fails(x: Any) -> Any:
        look(x).real.nothing()

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert works.address
        assert gc.isenabled() is enabled
        with pytest.raises(errors.TypingError):
            assert fails.address
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen
    assert not any(seen)
