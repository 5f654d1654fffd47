"""How a backend is found, chosen and loaded, and the errors where it is not."""

import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
from click.testing import CliRunner
from protocol_cases import X

from mxref import (
    Backend,
    OperandSpec,
    discovery,
    get_backend,
    quantize,
)
from mxref.cli import main
from mxref.discovery import candidates, choose
from mxref.errors import BackendError, LoadError
from mxref.reference import ReferenceBackend


@pytest.mark.clause("conformance.selection", evidence="known answer")
def test_selection_argument_then_environment_then_default(monkeypatch):
    monkeypatch.setenv("MXREF_BACKEND", "reference")
    assert choose("numba") == ("numba", "asked for by name")
    assert choose() == ("reference", "MXREF_BACKEND=reference")
    assert get_backend().name == "reference"
    monkeypatch.delenv("MXREF_BACKEND")
    name, reason = choose()
    assert name in ("numba", "reference")
    assert "the default: first of numba, reference" in reason


@pytest.mark.clause("conformance.selection", evidence="known answer")
@pytest.mark.parametrize(
    ("devices", "expected"), [({"cuda"}, "triton"), ({"cpu"}, "numba"), (None, "numba")], ids=str
)
def test_the_default_follows_the_device(monkeypatch, devices, expected):
    """Triton computes on GPUs, or under its interpreter on the CPU; or it is not installed."""
    fakes = {"numba": ReferenceBackend(), "reference": ReferenceBackend()}
    if devices:
        fakes["triton"] = ReferenceBackend()
        fakes["triton"].capabilities = replace(ReferenceBackend.capabilities, devices=frozenset(devices))

    def found(name):
        if name not in fakes:
            raise BackendError(f"{name} needs triton, which is not installed")
        return fakes[name]

    monkeypatch.setattr(discovery, "get_backend", found)
    monkeypatch.delenv("MXREF_BACKEND", raising=False)
    assert choose(device="cuda")[0] == expected
    assert choose(device="cpu")[0] == "numba"
    assert choose("reference", "cuda")[0] == "reference"
    monkeypatch.setenv("MXREF_BACKEND", "reference")
    assert choose(device="cuda") == ("reference", "MXREF_BACKEND=reference")


@pytest.mark.clause("conformance.selection", evidence="known answer")
def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        BackendError, match=r"unknown backend 'numbr' \(did you mean 'numba'\?\); known: .*reference"
    ):
        get_backend("numbr")


BACKEND_FILE = """
    from mxref.reference import ReferenceBackend

    class Mine(ReferenceBackend):
        name = "mine"

    backend = Mine()
    factory = Mine
    number = 3
"""


@pytest.mark.clause("conformance.selection", "conformance.protocol", evidence="known answer")
def test_one_file_is_a_backend(tmp_path, monkeypatch):
    path = tmp_path / "mine_backend.py"
    path.write_text(textwrap.dedent(BACKEND_FILE))
    monkeypatch.setenv("MXREF_BACKEND", f"{path}:backend")
    assert get_backend().name == "mine"
    assert get_backend(f"{path}:factory").quantize(X, OperandSpec()) == quantize(X)
    with pytest.raises(BackendError, match="is of type int, not an mxref.Backend"):
        get_backend(f"{path}:number")
    with pytest.raises(BackendError, match=r"has no 'bakend' \(did you mean 'backend'"):
        get_backend(f"{path}:bakend")
    monkeypatch.syspath_prepend(tmp_path)
    assert get_backend("mine_backend:backend").name == "mine"


@pytest.mark.parametrize("code", ["def quantize(x): ...", "class quantize:\n    def __init__(self, x): ..."])
def test_a_function_that_quantizes_is_no_backend_and_the_way_to_check_it_is_named(tmp_path, code):
    (tmp_path / "kernel.py").write_text(code)
    with pytest.raises(BackendError, match=r'takes arguments, .*: mxref.check_quantizer\(quantize, "amd"\)'):
        get_backend(f"{tmp_path}/kernel.py:quantize")


UNFINISHED = """
    from mxref import Backend, Capabilities

    class Unfinished(Backend):
        name, capabilities = "unfinished", Capabilities()
        def _quantize(self, x, plan): ...
        def _hadamard(self, x, rotation, axis): ...

    def make(): return Unfinished()
"""


@pytest.mark.clause("conformance.protocol", evidence="known answer")
@pytest.mark.parametrize(("name", "at_import"), [("backend", True), ("make", False), ("Unfinished", False)])
def test_a_backend_without_a_method_is_refused_in_one_line(tmp_path, name, at_import):
    path = tmp_path / "unfinished.py"
    path.write_text(textwrap.dedent(UNFINISHED) + ("backend = Unfinished()\n" if at_import else ""))
    with pytest.raises(
        BackendError, match="class Unfinished lacks _dequantize, _scaled_gemm: all four"
    ) as error:
        get_backend(f"{path}:{name}")
    assert "\n" not in str(error.value)


def test_missing_modules_and_files(tmp_path):
    with pytest.raises(BackendError, match=r"cannot load nowhere:backend: .*nowhere.py:backend"):
        get_backend("nowhere:backend")
    with pytest.raises(BackendError, match="cannot load"):
        get_backend(f"{tmp_path}/none.py:backend")


@pytest.mark.clause("conformance.selection", evidence="known answer")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(0)", r"its code raised SystemExit: 0 \(.*mine.py, line 1\)"),
        ("raise ValueError('bad\\n table')", r"its code raised ValueError: bad table \(.*mine.py, line 1\)"),
        ("raise RuntimeError", r"its code raised RuntimeError: no message \(.*mine.py, line 1\)"),
        ("def f(:", r"its code raised SyntaxError: .*line 1\)"),
        ("def backend(): exit(0)", r"its code raised SystemExit: 0"),
        ("import os; os._exit(0)", r"its code raised SystemExit: os\._exit\(0\) \(.*mine.py, line 1\)"),
    ],
)
def test_what_a_backends_code_raises_while_it_is_loaded_is_one_error(tmp_path, code, message):
    (tmp_path / "mine.py").write_text(f"{code}\n")
    with pytest.raises(LoadError, match=f"cannot load '.*mine.py:backend': {message}") as error:
        get_backend(f"{tmp_path}/mine.py:backend")
    assert "\n" not in str(error.value)


@pytest.mark.clause("conformance.selection", evidence="known answer")
def test_a_loaded_backend_may_fork_and_a_kept_exit_works_later(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from os import _exit, fork, waitpid\n"
        "child = fork()\n"
        "child or _exit(7)\n"
        "ended = waitpid(child, 0)[1] >> 8\n" + textwrap.dedent(BACKEND_FILE)
    )
    code = (
        "import sys; from mxref import get_backend; backend = get_backend(sys.argv[1])\n"
        "kept = sys.modules[type(backend).__module__]; kept._exit(kept.ended)"
    )
    command = [sys.executable, "-c", code, f"{tmp_path}/mine.py:backend"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 7


@pytest.mark.clause("conformance.selection", evidence="known answer")
@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import os; os._exit(0)"])
def test_training_with_a_backend_that_exits_is_refused(tmp_path, code):
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(f"{code}\n")
    command = ["train", "tiny", "--dry-run", "--backend", f"{tmp_path}/mine.py:backend"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert "its code raised SystemExit: " in result.stderr


@pytest.mark.clause("conformance.selection", evidence="known answer")
def test_a_file_has_a_name_of_its_own_and_finds_its_siblings(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("colorsys_of_mine", "colorsys"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "colorsys.py").write_text(f"import colorsys_of_mine\n{textwrap.dedent(BACKEND_FILE)}")
    (tmp_path / "colorsys_of_mine.py").write_text("import colorsys\nassert colorsys.hsv_to_rgb\n")
    assert get_backend(f"{tmp_path}/colorsys.py:backend").name == "mine"
    assert sys.modules["colorsys"].hsv_to_rgb
    assert sys.path[-1] == str(tmp_path)


def test_a_backend_without_capabilities_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(BACKEND_FILE) + "backend.capabilities = None\n")
    with pytest.raises(BackendError, match="declares nothing: give it `capabilities`"):
        get_backend(f"{tmp_path}/mine.py:backend")


def test_a_backend_whose_package_is_missing_says_what_to_install():
    code = """
        import sys
        sys.modules["numba"] = None
        from mxref.discovery import candidates, choose
        found = {c.name: c for c in candidates()}
        assert found["numba"].backend is None
        assert "pip install 'mxref[numba]'" in found["numba"].problem, found["numba"].problem
        assert choose()[0] == "reference"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env={"PATH": ""})


def test_candidates_hold_the_reference_and_their_source():
    found = {c.name: c for c in candidates()}
    assert found["reference"].source == "mxref.reference:backend"
    assert isinstance(found["reference"].backend, Backend)
