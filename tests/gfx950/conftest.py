"""Where the tests of this folder keep what Triton compiles, and the backend as a gfx950 would load it."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def _compiled_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Keep compiled kernels apart from the user's own, and between test runs if pytest keeps anything."""
    if request.config.pluginmanager.hasplugin("cacheprovider"):
        folder = request.config.cache.mkdir("triton-gfx950")
    else:
        folder = tmp_path_factory.mktemp("triton-gfx950")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="session")
def package(_compiled_once: None) -> dict[str, ModuleType]:
    """Return the backend's modules, by their last names."""
    from gfx950.compare import BACKENDS
    from gfx950.driver import load_package

    return load_package(BACKENDS, "check_scales", "quantizer.native", "products.matrix_cores")


@pytest.fixture(scope="session")
def backend(package: dict[str, ModuleType]) -> Any:
    """Return the backend without native conversions and matrix instructions."""
    from gfx950.driver import on_model

    with on_model():
        return package["backend"].TritonBackend(bounded="bf16", conversions="portable")
