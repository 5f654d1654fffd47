"""Discovery of backends, and the choice of one by argument, by MXREF_BACKEND or by default."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from mxref.backend import Backend
from mxref.capabilities import Capabilities
from mxref.errors import BackendError, LoadError, MxrefError
from mxref.tomlio import nearest, suggestion

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENVIRONMENT_VARIABLE = "MXREF_BACKEND"
ENTRY_POINT_GROUP = "mxref.backends"
PREFERENCE = ("numba", "reference")
"""Default backends on a CPU; the first installed one is used."""
ON_A_GPU = "triton"
"""Default backend on a GPU, where it is installed and computes there."""


@dataclass(frozen=True)
class Candidate:
    """A discovered backend: the loaded object, or the reason why it could not be loaded."""

    name: str
    source: str
    backend: Backend | None = None
    problem: str = ""


@dataclass
class _Registry:
    loaded: dict[str, Backend] = field(default_factory=dict)


_registry = _Registry()


def _points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # takes a fifth of the time of `import mxref`

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def candidates() -> list[Candidate]:
    """Load every discovered backend and return them in order of preference."""
    points = _points()
    order = [*(n for n in PREFERENCE if n in points), *sorted(n for n in points if n not in PREFERENCE)]
    found = []
    for name in order:
        source = points[name].value
        try:
            found.append(Candidate(name, source, get_backend(name)))
        except MxrefError as err:
            found.append(Candidate(name, source, problem=str(err)))
    return found


def choose(name: str | None = None, device: str = "cpu") -> tuple[str, str]:
    """Return the name of the backend to use and the reason for it: argument, environment, or default.

    Args:
        name: what was asked for, if anything was.
        device: type of the device on which the operands lie, `cpu` or `cuda`; the default follows it.

    Raises:
        SettingError: a variable of the default backend has a wrong value, which is no reason to take another backend.

    Implements: conformance.selection
    """
    if name:
        return name, "asked for by name"
    if chosen := os.environ.get(ENVIRONMENT_VARIABLE):
        return chosen, f"{ENVIRONMENT_VARIABLE}={chosen}"
    preference = (ON_A_GPU, *PREFERENCE) if device == "cuda" else PREFERENCE
    for preferred in preference:
        try:
            found = get_backend(preferred)
        except BackendError:
            continue
        if preferred == ON_A_GPU and device not in found.capabilities.devices:
            continue  # Triton's interpreter computes on the CPU
        where = " on a GPU" if device == "cuda" else ""
        return (
            preferred,
            f"the default{where}: first of {', '.join(preference)} that is installed; "
            f"{ENVIRONMENT_VARIABLE} is not set",
        )
    raise BackendError("no backend is installed; reinstall mxref")


def get_backend(name: str | None = None) -> Backend:
    """Return a backend, loaded once per process.

    Args:
        name: an entry-point name, `module:object` or `file.py:object`; default the environment variable
            MXREF_BACKEND, else the first of `PREFERENCE` that is installed.

    A file is loaded under a unique module name, so its own name does not matter. It can import modules from its
    folder, unless an installed module has the same name. A call of `os._exit` during loading raises LoadError.
    Compiled code can still end the process; `mxref conform` loads a backend in another process and reports this.

    Raises:
        BackendError: an unknown name (the message lists the known ones), a package that is not installed, or an
            object that is not a backend.
        LoadError: the backend's code raised another exception, such as `SystemExit`, while it was loaded.

    Implements: conformance.selection
    """
    if name is not None and not isinstance(name, str):
        raise BackendError(
            f"the name of a backend must be a string, as in 'reference' or 'file.py:object', got {type(name).__name__}"
        )
    if not name:
        name, _ = choose()
    if name not in _registry.loaded:
        with _own_failures(name):
            backend = _load(name)
            if callable(backend) and not isinstance(backend, Backend):
                _require_no_arguments(name, backend)
                backend = backend()
        if not isinstance(backend, Backend):
            raise BackendError(
                f"{name!r} is of type {type(backend).__name__}, not an mxref.Backend; "
                "see 'Add a backend' in the documentation"
            )
        if not isinstance(getattr(backend, "capabilities", None), Capabilities):
            raise BackendError(
                f"backend {name!r} declares nothing: give it `capabilities`, an instance of mxref.Capabilities"
            )
        _registry.loaded[name] = backend
    return _registry.loaded[name]


def _require_no_arguments(name: str, make: Callable[[], Backend]) -> None:
    try:
        inspect.signature(make).bind()
    except ValueError:
        return  # compiled code may have no signature
    except TypeError as err:
        raise BackendError(
            f"{name!r} takes arguments, and what makes a backend takes none; a function that quantizes a matrix is "
            f'checked in Python: mxref.check_quantizer({getattr(make, "__name__", "function")}, "amd")'
        ) from err


def load_function(name: str) -> Callable[[Any], Any]:
    """Return a function by `module:function` or `path/to/file.py:function`.

    Raises:
        BackendError: there is none of that name.
        LoadError: the code of its module raised another exception.
    """
    if ":" not in name:
        raise BackendError(f"{name!r} names no function; write module:function or path/to/file.py:function")
    with _own_failures(name):
        found: Callable[[Any], Any] = _load_object(*name.rsplit(":", 1))
    return found


def loaded_as(backend: Backend) -> str | None:
    """Return the name under which `get_backend` gives this backend; None for one that was made in another way."""
    for name, loaded in _registry.loaded.items():
        if loaded is backend:
            return name
    try:
        return backend.name if get_backend(backend.name) is backend else None
    except MxrefError:
        return None


@contextmanager
def _own_failures(name: str) -> Iterator[None]:
    """Convert exceptions of a backend's code during loading into a LoadError that names file and line."""
    try:
        with _refused_exit():
            yield
    except MxrefError:
        raise
    except (Exception, SystemExit) as err:
        text = " ".join(str(err).split()) or "no message"
        frames = [frame for frame in traceback.extract_tb(err.__traceback__) if frame.name != "refuse"]
        at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if not isinstance(err, SyntaxError) else ""
        raise LoadError(f"cannot load {name!r}: its code raised {type(err).__name__}: {text}{at}") from err


@contextmanager
def _refused_exit() -> Iterator[None]:
    """Make `os._exit` raise SystemExit in this process, so that a backend cannot end the program."""
    leave, process, loading = os._exit, os.getpid(), True

    def refuse(status: int) -> NoReturn:
        # Forked children and later calls of this function must still exit.
        if loading and os.getpid() == process:
            raise SystemExit(f"os._exit({status})")
        leave(status)

    os._exit = refuse
    try:
        yield
    finally:
        loading = False
        os._exit = leave


def _load(name: str) -> Backend | Callable[[], Backend]:
    if ":" in name:
        found: Backend | Callable[[], Backend] = _load_object(*name.rsplit(":", 1))
        return found
    points = _points()
    if name in points:
        try:
            loaded: Backend | Callable[[], Backend] = points[name].load()
        except ImportError as err:
            missing = (err.name or str(err)).partition(".")[0]
            raise BackendError(
                f"backend {name!r} needs {missing}, which is not installed: pip install 'mxref[{name}]'"
            ) from err
        except AttributeError as err:
            raise BackendError(
                f"backend {name!r}: entry point {points[name].value} leads nowhere: {err}"
            ) from err
        return loaded
    if name.endswith(".py"):
        raise BackendError(
            f"{name!r} is a file; name the backend in it too, as in {name}:backend for its variable `backend`"
        )
    known = [*points, "module:object", "path/to/file.py:object"]
    raise BackendError(f"unknown backend {name!r}{suggestion(name, points)}; known: {', '.join(known)}")


def _load_object(module_name: str, attribute: str) -> Any:
    try:
        if module_name.endswith(".py"):
            module = _file_module(Path(module_name))
        else:
            module = importlib.import_module(module_name)
    except (ImportError, OSError) as err:
        hint = (
            ""
            if module_name.endswith(".py")
            else f"; for a file that is not on the path write path/to/{module_name}.py:{attribute}"
        )
        raise BackendError(f"cannot load {module_name}:{attribute}: {err}{hint}") from err
    if not hasattr(module, attribute):
        raise BackendError(f"module {module_name!r} has no {attribute!r}{nearest(attribute, vars(module))}")
    return getattr(module, attribute)


def _file_module(path: Path) -> ModuleType:
    """Import a file under a unique module name; its folder is appended to the import path."""
    folder = str(path.resolve().parent)
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    # The file may have the name of a module that other code imports.
    spec = importlib.util.spec_from_file_location(f"mxref_backend_{path.stem}_{digest}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot read {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
