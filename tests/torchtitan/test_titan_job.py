"""What a job of torchtitan must be for converted layers, and how its stages and configurations are converted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cpu_job
import pytest
import torch
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.lora import LoRAConverter
from torchtitan.config import ConfigManager
from torchtitan.distributed.pipeline_parallel import _split_module
from torchtitan.models.llama3 import model_registry

from mxref.errors import RecipeError, UnsupportedError
from mxref_torch import Handle, LayerError
from mxref_torch.torchtitan import MXCheckpointManager, MXLinearConverter, follow
from mxref_torch.torchtitan.config_registry import llama3_8b_mxfp4_h16, llama3_debugmodel_mxfp4_h16


def update(config: Any) -> None:
    config.model_spec.model.update_from_config(config=config)


def test_a_job_follows_its_optimizers_and_saves_the_place_by_itself() -> None:
    config = llama3_debugmodel_mxfp4_h16()
    config.checkpoint.interval = 17
    update(config)
    assert config.model_spec.post_optimizer_build_fn is follow
    assert isinstance(config.checkpoint, MXCheckpointManager.Config)
    assert config.checkpoint.interval == 17
    assert config.model_spec.model.mxref.steps == config.training.steps
    assert config.to_dict()["model_spec"]["model"]["mxref"]["recipe"] == "mxfp4_h16"


def test_what_a_model_does_after_its_optimizers_are_built_still_runs_and_once() -> None:
    config, ran = llama3_debugmodel_mxfp4_h16(), []
    config.model_spec.post_optimizer_build_fn = lambda *given: ran.append(given)
    update(config)
    update(config)
    config.model_spec.post_optimizer_build_fn(
        [], [], type("Alone", (), {"get_optional_mesh": lambda self, _: None})()
    )
    assert len(ran) == 1


def set_at(path: str, value: object) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        *rooms, key = path.split(".")
        for room in rooms:
            config = getattr(config, room)
        setattr(config, key, value)

    return change


def pipeline(schedule: str) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        set_at("parallelism.pipeline_parallel_degree", 2)(config)
        set_at("parallelism.pipeline_parallel_schedule", schedule)(config)

    return change


class OtherManager(BaseCheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        pass


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (set_at("training.disable_cuda_graphs", False), UnsupportedError, "disable_cuda_graphs"),
        (set_at("training.dtype", "bfloat16"), LayerError, "mixed_precision_param"),
        (set_at("parallelism.tensor_parallel_degree", 2), UnsupportedError, "set it to 1"),
        (set_at("parallelism.spmd_backend", "full_dtensor"), UnsupportedError, "'partial_dtensor'"),
        (pipeline("InterleavedZeroBubble"), UnsupportedError, "1F1B"),
        (set_at("checkpoint", OtherManager.Config(enable=True)), LayerError, "MXCheckpointManager"),
    ],
)
def test_a_job_that_would_compute_something_else_is_refused(
    change: Callable[[Any], None], error: type[Exception], text: str
) -> None:
    config = llama3_debugmodel_mxfp4_h16()
    change(config)
    with pytest.raises(error, match=text):
        update(config)


def test_a_stage_of_a_pipeline_keeps_the_random_streams_of_its_layers() -> None:
    config = model_registry("debugmodel", converters=[MXLinearConverter.Config(recipe="mxfp4_h16")]).model
    cpu_job.attend_on_a_cpu(config)
    with torch.device("meta"):
        model = config.build()
    stage = _split_module(model, ["layers.4", "layers.5", "norm", "lm_head"])
    handle = Handle(stage)
    assert handle.context is not Handle(model).context
    assert [stage.get_submodule(name).index for name in handle.layers] == list(range(20, 30))
    assert copy.deepcopy(stage).get_submodule("layers.4.attention.wo").index == 21


def build(converters: list[Any]) -> torch.nn.Module:
    config = model_registry("debugmodel", converters=converters).model
    with torch.device("meta"):
        return config.build()


def test_wrong_converters_are_refused() -> None:
    mx = MXLinearConverter.Config
    with pytest.raises(RecipeError, match="mxfp4_h16"):
        build([mx(recipe="mxfp4_h61")])
    with pytest.raises(LayerError, match=r"'\*layer.0\*' matches no linear layer"):
        build([mx(recipe="mxfp4_h16", fqns=["layer.0"])])
    with pytest.raises(LayerError, match="leave none of 31"):
        build([mx(recipe="mxfp4_h16", fqns=["w1"], filter_fqns=["layers"])])
    with pytest.raises(LayerError, match="already"):
        build([mx(recipe="mxfp4_h16"), mx(recipe="fp8")])
    with pytest.raises(LayerError, match="LoRA"):
        build([mx(recipe="mxfp4_h16"), LoRAConverter.Config(rank=8, alpha=16.0, target_modules=["wo"])])


def test_a_converted_lm_head_under_a_loss_in_chunks_is_refused() -> None:
    from mxref.recipe_files import recipe_from_table

    model = build([MXLinearConverter.Config(recipe=recipe_from_table({"keep_bf16": []}))])
    model._skip_lm_head = True  # as the trainer sets it for ChunkedLossWrapper
    alone = type("Alone", (), {"get_optional_mesh": lambda self, _: None})()
    with pytest.raises(LayerError, match="ChunkedLossWrapper"):
        follow([], [model], alone)


def test_the_configuration_of_the_8b_model_is_found_by_its_name_and_takes_options() -> None:
    module = ["--module", "mxref_torch.torchtitan", "--config", "llama3_8b_mxfp4_h16"]
    config = ConfigManager().parse_args([*module, "--training.steps", "9", "--checkpoint.enable"])
    assert config.training.steps == 9
    assert config.compile.enable
    assert type(config.checkpoint) is CheckpointManager.Config
    update(config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert len(Handle(model).layers) == 32 * 5
    assert llama3_8b_mxfp4_h16().model_spec.flavor == "8B"
