"""Exceptions that nobody expected, of a backend or elsewhere: one line for the user, the traceback in the run's log."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from mxref.reference import ReferenceBackend
from mxref_training.errors import ConfigError, RunError
from mxref_training.progress import ProgressSink
from mxref_training.run_folder import LOG
from training_setup import change, metrics, run

EVALUATED = change(eval_every=100, checkpoint_every=1)


class Failing(ReferenceBackend):
    """Raises an exception in a chosen call of a chosen method."""

    name = "failing"

    def __init__(self, method: str, call: int, error: BaseException) -> None:
        self.method, self.left, self.error = method, call, error

    def _count(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left == 0:
                raise self.error

    def _quantize(self, *given: Any) -> Any:
        self._count("quantize")
        return super()._quantize(*given)

    def _quantize_dual(self, *given: Any) -> Any:
        self._count("quantize_dual")
        return super()._quantize_dual(*given)

    def _prepare(self, *given: Any) -> Any:
        self._count("prepare")
        return super()._prepare(*given)

    def _scaled_gemm(self, *given: Any) -> Any:
        self._count("scaled_gemm")
        return super()._scaled_gemm(*given)

    def _add_product(self, *given: Any) -> Any:
        self._count("add_product")
        return super()._add_product(*given)

    def range_exceeded(self) -> bool:
        self._count("range_exceeded")
        return False


def failed(tmp_path: Path, method: str, call: int, error: BaseException, **options: Any) -> RunError:
    with pytest.raises(RunError) as caught:
        run(tmp_path / "run", "mxfp4", EVALUATED, backend=Failing(method, call, error), **options)
    assert "\n" not in str(caught.value)
    return caught.value


# The model has seven linear layers. Forward quantizes seven W and four X, which q, k, v and gate, up share.
@pytest.mark.parametrize(
    ("method", "call", "said"),
    [
        ("quantize_dual", 1, "quantize, w of layer model.layers.0.self_attn.q_proj"),
        ("quantize_dual", 8, "quantize, x of layer model.layers.0.self_attn.q_proj"),
        ("quantize_dual", 15, "quantize, dy of layer model.layers.0.mlp.down_proj"),
        ("scaled_gemm", 1, "scaled_gemm (fprop, layer model.layers.0.self_attn.q_proj)"),
        ("scaled_gemm", 8, "scaled_gemm (dgrad, layer model.layers.0.mlp.down_proj)"),
        ("scaled_gemm", 9, "scaled_gemm (wgrad, layer model.layers.0.mlp.down_proj)"),
        ("prepare", 1, "prepare"),
        ("add_product", 1, "add_product (wgrad, layer model.layers.0.mlp.down_proj)"),
    ],
)
def test_a_failing_backend_is_named_with_operation_and_layer(
    method: str, call: int, said: str, tmp_path: Path
) -> None:
    err = failed(tmp_path, method, call, ValueError("bad\nluck"))
    assert f"backend 'failing' failed in {said}: ValueError: bad luck ({__file__}, line " in str(err)
    assert str(err).startswith("the run stopped after 0 of 6 steps: ")


def test_the_traceback_is_in_the_log(tmp_path: Path) -> None:
    err = failed(tmp_path, "scaled_gemm", 3, RuntimeError("no kernel image"))
    log = tmp_path / "run" / LOG
    assert f"its traceback is in {log}" in str(err)
    text = log.read_text()
    assert text.startswith("--- 20")
    assert "Traceback (most recent call last)" in text
    assert "\nRuntimeError: no kernel image\nmxref: backend 'failing' failed in scaled_gemm" in text
    assert isinstance(err.__cause__, RuntimeError)
    failed(tmp_path, "scaled_gemm", 3, RuntimeError("again"))
    assert log.read_text().startswith(text), "a later failure is added"


def test_the_same_command_goes_on(tmp_path: Path) -> None:
    backend = Failing("range_exceeded", 3, KeyError("scale"))
    with pytest.raises(RunError, match="the run stopped after 2 of 6 steps") as caught:
        run(tmp_path / "run", "mxfp4", EVALUATED, backend=backend)
    assert "the same command goes on from step 2" in str(caught.value)
    run(tmp_path / "run", "mxfp4", EVALUATED, backend=backend)
    run(tmp_path / "whole", "mxfp4", EVALUATED, backend=Failing("", 0, KeyError()))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    run(tmp_path / "run", "mxfp4", EVALUATED, backend=backend, resume=False)
    assert not (tmp_path / "run" / LOG).exists(), "the log belongs to the run that was deleted"


def test_a_failure_before_the_first_step_leaves_a_usable_folder(tmp_path: Path) -> None:
    from mxref.recipe_files import recipe_from_table

    recipe = recipe_from_table({"dialect": "amd", "all": {"rounding": "sr"}})
    with pytest.raises(RunError, match="the run stopped before its first step: backend 'failing' failed in "):
        run(tmp_path / "run", recipe, EVALUATED, backend=Failing("quantize_dual", 1, TypeError("x")))
    assert [p.name for p in (tmp_path / "run").iterdir() if p.suffix != ".lock"] == [LOG]
    run(tmp_path / "run", "bf16", EVALUATED)


def test_a_backend_that_ends_the_program_is_an_error(tmp_path: Path) -> None:
    err = failed(tmp_path, "scaled_gemm", 1, SystemExit(0))
    assert "SystemExit: 0" in str(err)


def test_an_answer_of_the_wrong_kind_is_the_backends_failure(tmp_path: Path) -> None:
    class Nothing(ReferenceBackend):
        name = "nothing"

        def quantize_dual(self, *given: Any, **named: Any) -> Any:
            return None

    with pytest.raises(
        RunError,
        match="backend 'nothing' failed in quantize, w of layer model.layers.0.self_attn.q_proj: TypeErr",
    ):
        run(tmp_path / "run", "mxfp4", backend=Nothing())


def test_other_exceptions_name_their_place(tmp_path: Path) -> None:
    class Broken(ProgressSink):
        def step(self, step: int, loss: float | None) -> None:
            raise KeyError("bar")

    with pytest.raises(RunError) as caught:
        run(tmp_path / "run", progress=Broken())
    assert f"the run stopped after 1 of 6 steps: KeyError: 'bar' ({__file__}, line " in str(caught.value)
    assert "backend" not in str(caught.value)


def test_errors_with_a_remedy_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="^out of memory.*set run.recompute = 'full', lower run.micro_batch"
    ):
        run(tmp_path / "a", "mxfp4", backend=Failing("scaled_gemm", 1, torch.OutOfMemoryError("CUDA")))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", "mxfp4", backend=Failing("scaled_gemm", 1, KeyboardInterrupt()))
    assert not (tmp_path / "a" / LOG).exists()


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    err = failed(tmp_path, "scaled_gemm", 1, RuntimeError("word " * 1000))
    assert len(str(err)) < 1000
    assert len((tmp_path / "run" / LOG).read_text()) > 5000


def test_a_child_of_a_ladder_that_fails_outside_training_says_why(tmp_path: Path) -> None:
    task = tmp_path / "task.json"
    task.write_text('["numba", {}, {}]')
    command = [sys.executable, "-m", "mxref_training.lab.worker", str(task)]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with warm.Popen(command, text=True, **pipes) as process:
        _, said = process.communicate()
    assert process.returncode == 2
    assert "Traceback" in said
    assert re.fullmatch(r"error: KeyError: '\w+' \(.*arm\.py, line \d+\)", said.splitlines()[-1])
