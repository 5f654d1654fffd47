"""Steps of several ranks as CUDA graphs, NCCL's operations in them: the bits of the same steps without graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu.launched import PATIENCE, end, start
from training_setup import lines, metrics, newest

SCRIPT = Path(__file__).with_name("captured_ranks.py")


def trained(folder: Path, recipe: str, way: str, form: str) -> dict[str, bytes]:
    """Train on two ranks in processes of their own; return what the checkpoint holds."""
    end(start(str(SCRIPT), str(folder), recipe, way, form))
    step = folder / "checkpoints" / f"step-{newest(folder)}"
    return {path.name: path.read_bytes() for path in sorted(step.glob("*.safetensors"))}


@pytest.mark.timeout(2 * PATIENCE + 60)
@pytest.mark.parametrize("form", ["split", "kept", "whole"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp4_h16"])
def test_the_bits_of_two_ranks_are_those_without_graphs(recipe: str, form: str, tmp_path, cases):
    """Clipped gradients, two micro-batches, evaluations between steps: metrics and checkpoints."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    graph, plain = (trained(tmp_path / way, recipe, way, form) for way in ("graph", "plain"))
    assert metrics(tmp_path / "graph") == metrics(tmp_path / "plain")
    assert len({line["loss"] for line in lines(tmp_path / "graph") if "loss" in line}) == 7
    assert graph == plain
    cases(1)
