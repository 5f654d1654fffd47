"""Compiled kernels on disk, reused only while every source that they depend on is unchanged.

Numba's own cache keeps a compiled function until its own file changes, although kernels of other files are compiled
into it. It also numbers files per function, so two processes that compile at the same time can give one number to
different code. Here the name of a file depends on everything that the code depends on: the sources of this package and
of the specification whose constants the kernels freeze, the versions of the compiler, the CPU, and the types.

Where the files lie is still Numba's decision: NUMBA_CACHE_DIR, the package's own `__pycache__`, or the
user's cache folder where the package cannot be written. A file holds a pickle and machine code, so whoever writes
it decides what runs: a folder that other users can change is not used (`mxref.trust`).
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import hashlib
import os
import pickle
import re
import tempfile
import warnings
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import config
from numba.core.caching import FunctionCache, NullCache
from numba.core.serialize import dumps

from mxref import trust

CONSTANTS_FROM = (
    "formats",
    "steps/four_over_six",
    "steps/hadamard",
    "steps/random",
    "steps/rounding",
    "steps/scale",
)
"""Modules and packages of `mxref` whose constants kernels freeze when they are compiled."""

REFUSED: dict[str, None] = {}
"""Why folders that Numba would have used were refused, in the order of refusal."""

_DIGEST = hashlib.sha256().digest_size
_NAME = re.compile(r"\.(?P<sources>[0-9a-f]{16})-[0-9a-f]{16}\.kernel$")


@cache
def source_stamp() -> str:
    """Return a digest of every module on which kernels depend, as they were at the first call."""
    own, specification = Path(__file__).parent, Path(trust.__file__).parent
    patterns = [pattern for name in CONSTANTS_FROM for pattern in (f"{name}.py", f"{name}/**/*.py")]
    files = sorted(own.rglob("*.py")), *(sorted(specification.glob(pattern)) for pattern in patterns)
    digest = hashlib.sha256()
    for file in chain(*files):
        digest.update(hashlib.sha256(f"{file.name}\0".encode() + file.read_bytes()).digest())
    return digest.hexdigest()[:16]


class _KernelFiles:
    """The files of one kernel: `<kernel>.<sources>-<types, CPU and compiler>.kernel`, a digest and a pickle."""

    def __init__(self, folder: Path, base: str) -> None:
        self._folder, self._base = folder, base

    def _path(self, key: Any) -> Path:
        made_by = (key, numba.__version__, llvmlite.__version__)
        name = hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]
        return self._folder / f"{self._base}.{source_stamp()}-{name}.kernel"

    def load(self, key: Any) -> Any:
        """Return what was saved under the key; None if there is no file, or it is damaged or another user's."""
        try:
            data = trust.read_trusted(self._path(key))
        except OSError:
            return None
        if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
            return None
        saved_key, value = pickle.loads(data[_DIGEST:])
        return value if saved_key == key else None

    def save(self, key: Any, value: Any) -> None:
        """Write a file atomically and remove the files of other sources; a full disk gives a warning."""
        payload = dumps((key, value))
        path = self._path(key)
        try:
            handle, partial = tempfile.mkstemp(prefix=".", suffix=".partial", dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as f:
                    f.write(hashlib.sha256(payload).digest() + payload)
                os.replace(partial, path)
            except OSError:
                os.unlink(partial)
                raise
            for file in self._folder.glob("*.kernel"):
                if (named := _NAME.search(file.name)) and named["sources"] != source_stamp():
                    file.unlink(missing_ok=True)
        except OSError as err:
            warnings.warn(
                f"a compiled kernel could not be kept in {self._folder} ({err}), so the next process compiles it "
                "again: make room there, or point NUMBA_CACHE_DIR to another folder",
                RuntimeWarning,
                stacklevel=2,
            )


class UntrustedFolder(RuntimeError):
    """A folder of compiled kernels that other users can change; the message says why."""


@cache
def _why_untrusted(folder: str) -> str:
    """Return why a folder cannot be trusted, found out once: a process has tens of kernels in few folders."""
    return trust.why_untrusted(folder)


class _Trusted:
    """One of Numba's cache locators, which refuses folders that other users can change."""

    def __init__(self, locator: Any) -> None:
        self._locator = locator

    def from_function(self, function: Any, file: str) -> Any:
        found = self._locator.from_function(function, file)
        if found is None or not (reason := _why_untrusted(found.get_cache_path())):
            return found
        REFUSED.setdefault(reason)
        # A folder that the user named is never replaced by another one.
        if config.CACHE_DIR:  # type: ignore[attr-defined]
            raise UntrustedFolder(reason)
        return None


class _Implementation(FunctionCache._impl_class):  # type: ignore[misc, valid-type]
    _locator_classes = [_Trusted(locator) for locator in FunctionCache._impl_class._locator_classes]  # noqa: RUF012


class KernelCache(FunctionCache):
    """Numba's cache of one function, with the files above; without a folder to write, RuntimeError."""

    _impl_class = _Implementation

    def __init__(self, function: Any, codegen: Any = None) -> None:
        """Take the function's folder; kernels of a `codegen` are found by its CPU, all others by Numba's."""
        super().__init__(function)
        self._codegen = codegen
        folder = Path(self.cache_path).resolve()
        if reason := _why_untrusted(str(folder)):  # NUMBA_CACHE_LOCATOR_CLASSES replaces the ways above
            raise UntrustedFolder(reason)
        self._cache_file: Any = _KernelFiles(folder, self._impl.filename_base)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return super()._index_key(sig, self._codegen or codegen)


def kernel_cache(function: Any, codegen: Any = None) -> Any:
    """Return the cache of a kernel, or one that keeps nothing, with a warning, where no folder can be written."""
    try:
        return KernelCache(function, codegen)
    except UntrustedFolder as err:
        _warn_uncached(str(err))
    except RuntimeError as err:
        if "no locator available" not in str(err):
            raise
        _warn_uncached("; ".join(REFUSED) or "Numba finds no folder that can be written")
    return NullCache()


@cache
def _warn_uncached(reason: str) -> None:
    warnings.warn(
        f"compiled kernels are kept nowhere ({reason}), so every process compiles its own, for many seconds: "
        "set NUMBA_CACHE_DIR to a folder that you alone can write",
        RuntimeWarning,
        stacklevel=2,
    )
