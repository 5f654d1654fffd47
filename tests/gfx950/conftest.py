"""Where the tests of this folder keep what Triton compiles."""

from __future__ import annotations

from collections.abc import Iterator

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
