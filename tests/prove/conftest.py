"""Kernels that tests prove, compiled once for a run."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def compiled(request, tmp_path_factory):
    """Kernels by target and case, compiled once; the quick ones first, the others when one is asked for."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from prove.kernels import QUICK, compile_cases, theorems

    with pytest.MonkeyPatch.context() as patch:
        if request.config.pluginmanager.hasplugin("cacheprovider"):
            patch.setenv("TRITON_CACHE_DIR", str(request.config.cache.mkdir("triton-gfx950")))
        else:
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        found = {}

        def get(target, name):
            if (target, name) not in found:
                wanted = (
                    QUICK if name in QUICK else [n for n, at in theorems() if at == target and n not in QUICK]
                )
                found.update({(target, c.case): c for c in compile_cases(target, wanted)})
            return found[target, name]

        yield get
