"""These tests need torchtitan, which has an environment of its own: `make test-torchtitan`."""

from __future__ import annotations

import importlib.metadata
import warnings

try:
    importlib.metadata.version("torchtitan")
except importlib.metadata.PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # modules of torch and torchtitan cause warnings when they are imported
        import cpu_job  # noqa: F401
