"""Graphs that PyTorch keeps on disk: none is reused after the code of mxref has changed."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mxref_torch import operators
from mxref_torch.operators import dense

MULTIPLY = """
import torch
from torch._dynamo.utils import counters
from mxref_torch.operators.dense import dense_gemm

a, b = torch.arange(12.0).reshape(3, 4).bfloat16(), torch.arange(8.0).reshape(2, 4).bfloat16()
product = torch.compile(lambda a, b: dense_gemm(a, b, "fprop"), fullgraph=True)(a, b)
assert torch.equal(product, a @ b.T)
print(len(dense_gemm._schema.arguments), "kept" if counters["inductor"]["fxgraph_cache_hit"] else "new")
"""


def test_a_graph_of_another_signature_is_not_reused(tmp_path: Path) -> None:
    """A version with one more argument compiles first. PyTorch writes the defaults of arguments into what it keeps."""
    before = tmp_path / "before" / "mxref_torch"
    shutil.copytree(Path(operators.__file__).parents[1], before)
    source = before / "operators" / "dense.py"
    last = "    b_inverse: torch.Tensor | None = None,\n"
    assert source.read_text().count(last) == 1
    source.write_text(source.read_text().replace(last, last + "    c: torch.Tensor | None = None,\n"))

    def run(*first: str) -> str:
        path = os.pathsep.join([*first, *filter(None, sys.path)])
        environment = os.environ | {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kept")}
        command = [sys.executable, "-W", "ignore", "-c", MULTIPLY]
        return subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, check=True).stdout

    assert run(str(before.parent)) == "7 new\n"
    assert run() == "6 new\n"
    assert run() == "6 kept\n"


@pytest.mark.parametrize("name", ["mxref", "mxref_torch", "mxref_numba"])
def test_the_overload_follows_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    real = importlib.util.find_spec

    def found(asked: str) -> object:
        if asked != name:
            return real(asked)
        return importlib.util.spec_from_file_location(
            name, package / "__init__.py", submodule_search_locations=[str(package)]
        )

    monkeypatch.setattr(operators, "find_spec", found)
    version = operators._version.__wrapped__
    seen = {dense.dense_gemm._overloadname, version()}
    (package / "inner").mkdir()
    (package / "inner" / "module.py").write_text("K = 16\n")
    seen.add(version())
    (package / "inner" / "module.py").write_text("K = 32\n")
    seen.add(version())
    assert len(seen) == 4
