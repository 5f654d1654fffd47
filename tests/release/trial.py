"""What a user can do with the wheel alone: each command, and what it must print."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from release.environment import Environment
from release.errors import ReleaseError
from release.network import require_cut

Said = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """A command, a part of its output, and its exit code."""

    words: tuple[str, ...]
    shows: str
    code: int = 0


def _step(command: str, shows: str, code: int = 0) -> Step:
    return Step(tuple(command.split()), shows, code)


PACKAGES = ("mxref", "mxref_numba", "mxref_triton", "mxref_torch", "mxref_training")

EXTRAS = ("training",)

ALONE = (
    _step("mxref explain 1 2 3", "scale 7e  codes 64 07"),
    _step("mxref explain 1 2 3 --link", "/mxref/explain/explorer/index.html"),
    _step("mxref vectors verify --format mxfp8_e5m2", "agree"),
    _step("mxref conform --backend reference --quick", "reference conforms"),
    _step("mxref backends", "chosen: reference"),
    _step("mxref recipes mxfp4_h16", "hadamard = 16"),
    _step("mxref conform --backend toy_backend.py:backend --quick", "toy conforms"),
    _step("mxref conform --backend planted_fault_backend.py:backend --quick", "first: rounding.rne", 1),
    _step("python check.py", "rounding.rne: crafted blocks", 1),
    *(
        _step(f"mxref {command}", "needs torch, which is not installed: pip install 'mxref[training]'", 2)
        for command in ("train tiny", "ablate demo", "probe run", "report run", "export run out")
    ),
    Step(("python", "-c", "import mxref_torch"), "not installed: pip install 'mxref[training]'", 1),
)
"""With the dependencies alone."""

STRANGER = {
    "toy_backend.py": "docs/examples/toy_backend.py",
    "planted_fault_backend.py": "docs/examples/planted_fault_backend.py",
}
"""Files of the checkout that a stranger's folder has: a right backend, and one with a fault."""

CHECK = """\
import mxref
from planted_fault_backend import backend

mxref.check_quantizer(lambda x: backend.quantize(x, mxref.OperandSpec()), "ocp").require()
"""
"""What the stranger calls `check.py`."""

VECTORS = Step(
    (
        "python", "-c",
        "import json; from importlib.resources import files; "
        "print('records:', len(json.loads((files('mxref_vectors') / 'scale.json').read_bytes())['records']) > 0)",
    ),
    "records: True",
)  # fmt: skip
"""With the wheel of the golden vectors alone."""

TRAINING = (
    _step("mxref train tiny --set run.steps=4 --backend reference --out run", "validation loss"),
    _step("mxref report run", "report.html"),
    _step("mxref ablate paper --list", "MXFP4"),
)
"""With the extra `training`. The built-in text is made anew, from the documentation of Python and the dependencies."""


def require_trial(
    made: Environment, steps: tuple[Step, ...], checkout: Path, version: str, said: Said
) -> None:
    """Raise ReleaseError unless an environment has no network, no module of a checkout, and every step succeeds."""
    require_cut(made.cut, made.bin / "python", made.variables)
    require_own_modules(made, checkout, version)
    for name, source in STRANGER.items():
        shutil.copy(checkout / source, made.home / name)
    (made.home / "check.py").write_text(CHECK, encoding="utf-8")
    said(f"an environment of the wheel alone, without a network ({made.cut.name})")
    for step in steps:
        require_step(made, step)
        said(" ".join(step.words))


def require_step(environment: Environment, step: Step) -> None:
    """Raise ReleaseError unless a command ends with its code and prints what it must."""
    done = environment.run(*step.words)
    printed = done.stdout + done.stderr
    if done.returncode != step.code or step.shows not in printed:
        raise ReleaseError(
            f"{' '.join(step.words)}: exit code {done.returncode}, expected {step.code}, and {step.shows!r} in "
            f"what it prints:\n{printed}"
        )


def require_own_modules(environment: Environment, checkout: Path, version: str) -> None:
    """Raise ReleaseError unless the environment's modules are those of the wheel, at the version that is stated."""
    code = "import sys\nfrom importlib.util import find_spec\n"
    code += f"print(*[find_spec(name).origin for name in {PACKAGES}], *sys.path, sep='\\n')"
    done = environment.run("python", "-c", code)
    lines = done.stdout.split()
    if done.returncode or not lines:
        raise ReleaseError(f"the packages of the wheel are not found: {done.stderr.strip()}")
    inside = str(environment.folder)
    for line in lines:
        of_mxref = "mxref" in Path(line).parts
        if (of_mxref and not line.startswith(inside)) or Path(line).is_relative_to(checkout):
            raise ReleaseError(f"the environment of the wheel uses {line}, which is not the wheel's")
    require_step(environment, Step(("mxref", "--version"), f"mxref {version}\n"))
