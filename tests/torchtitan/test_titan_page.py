"""The commands of the page on torchtitan run: on two ranks of a CPU, or as far as a CPU can take them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import cpu_job
import pytest
from torchtitan.config import ConfigManager

from places import ROOT

PAGE = (ROOT / "docs" / "how-to" / "torchtitan.rst").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^   \$ (torchrun .*)$", PAGE, re.MULTILINE)
SMALL = ["--training.local_batch_size", "1", "--training.seq_len", "64"]


def block(language: str) -> str:
    (found,) = re.findall(rf"\.\. code-block:: {language}\n\n((?:   .*\n|\n)+)", PAGE)
    return textwrap.dedent(found)


def test_the_job_of_the_page_trains_on_two_ranks_with_equal_scales(tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(block("toml"))
    (tmp_path / "my_jobs.py").write_text(block("python"))
    cpu_job.write_assets(tmp_path)
    torchrun, *options = shlex.split(next(command for command in COMMANDS if "my_jobs" in command))
    place = options.index("-m")
    assert (torchrun, options[place + 1]) == ("torchrun", "torchtitan.train")
    options[place : place + 2] = [cpu_job.__file__]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", *options, *SMALL],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "MXREF_BACKEND": "numba"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert block("text").strip() in log
    assert "Applied FSDP to the model" in log
    ((step, scales),), other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert step == 3
    assert len(scales) == 2 * 25
    assert other == [[step, scales]]


@pytest.mark.parametrize("name", ["llama3_8b_mxfp4_h16", "llama3_8b_fp8", "llama3_debugmodel_mxfp4_h16"])
def test_the_command_of_the_page_names_configurations_and_options_that_exist(name: str) -> None:
    assert f"`{name}`" in PAGE or f"--config {name} " in PAGE
    options = shlex.split(next(command for command in COMMANDS if "8b" in command))
    options = options[options.index("torchtitan.train") + 1 :]
    options[options.index("--config") + 1] = name
    config = ConfigManager().parse_args(options)
    assert config.checkpoint.enable
    config.model_spec.model.update_from_config(config=config)
    assert config.model_spec.model.mxref.recipe in name
