"""`run.deterministic` on a GPU: processes that share it, each with a compiler's cache of its own, get the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from training_setup import files

TRAIN = """
import sys
from dataclasses import replace
from pathlib import Path
from mxref.discovery import get_backend
from mxref.gemm import gemm_profile
from mxref.recipe_files import load_recipe
from mxref_training.config import Compile
from training_setup import CONFIG, change, run

recipe = replace(load_recipe(sys.argv[1]), gemm=gemm_profile("bounded"))
model = replace(CONFIG.model, layers=2, width=512, heads=8, kv_heads=8, ffn=512, max_seq=128)
sizes = dict(steps=20, eval_every=10, batch=8, micro_batch=8, seq_len=128, eval_tokens=128)
config = change(replace(CONFIG, model=model), deterministic=True, compile=Compile.BLOCK, capture=True, **sizes)
run(Path(sys.argv[2]), recipe, config, backend=get_backend("triton"))
"""


def start(folder: Path, recipe: str) -> subprocess.Popen[bytes]:
    caches = {name: str(folder / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    environment = os.environ | caches | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", TRAIN, recipe, str(folder / "run")]
    folder.mkdir()
    return subprocess.Popen(command, env=environment)


@pytest.mark.parametrize("recipe", ["mxfp4_h16", "fp8"])
def test_two_processes_that_share_the_gpu_train_as_one_alone(recipe, tmp_path, cases):
    folders = [tmp_path / name for name in ("alone", "left", "right")]
    assert start(folders[0], recipe).wait() == 0
    together = [start(folder, recipe) for folder in folders[1:]]
    assert [process.wait() for process in together] == [0, 0]
    want, *found = (
        {
            name: data
            for name, data in files(folder / "run").items()
            if name.endswith((".safetensors", "metrics.jsonl"))
        }
        for folder in folders
    )
    assert len(want) >= 3
    assert found == [want, want]
    cases(20)
