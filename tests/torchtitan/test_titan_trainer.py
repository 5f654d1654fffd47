"""torchtitan's whole trainer on a CPU: FSDP2, activation checkpointing, compiled blocks, and its checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cpu_job
import pytest
import torch
from torch import nn
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from mxref import GemmRole
from mxref.recipe import Recipe
from mxref.recipe_files import recipe_from_table
from mxref_torch import LayerError, convert
from mxref_torch.layer.linear import MXLinear
from mxref_torch.torchtitan import MXLinearConverter

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # torchtitan, torchdata and PyTorch's checkpoints cause warnings
SEED = 7
MIXED = recipe_from_table(
    {"fprop": {"format": "fp8"}, "dgrad": {"rounding": "sr"}, "wgrad": {"rounding": "sr"}}
)
"""FP8 under delayed scaling in the forward pass, random bits in the backward pass."""


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cpu_job.write_assets(tmp_path)
    cpu_job.one_process()


@pytest.fixture(scope="module", autouse=True)
def _process() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.distributed.destroy_process_group()


def job(recipe: Recipe | str, steps: int) -> Any:
    """Return the configuration of a job that trains two layers of torchtitan's debug model."""
    config = llama3_debugmodel()
    converter = MXLinearConverter.Config(recipe=recipe, backend="numba", seed=SEED)
    config.model_spec = model_registry("debugmodel", converters=[converter])
    del config.model_spec.model.layers[2:]
    cpu_job.attend_on_a_cpu(config.model_spec.model)
    config.training.disable_cuda_graphs = True
    config.training.steps, config.training.local_batch_size, config.training.seq_len = steps, 2, 64
    config.lr_scheduler.warmup_steps, config.debug.seed, config.validator.enable = 0, 0, False
    return config


def train(config: Any) -> tuple[list[float], nn.Module]:
    """Train, and return the losses and the model."""
    trainer = config.build()
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: losses.append(loss)
    trainer.train()
    trainer.close()
    (model,) = trainer.model_parts
    return losses, model


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def saving(recipe: Recipe | str, steps: int) -> Any:
    config = job(recipe, steps)
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.keep_latest_k = True, 2, 0
    return config


def test_a_resumed_job_repeats_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    losses, model = train(saving(MIXED, 4))
    state = model.mxref_handle.state_dict()
    assert (state["step"], state["seed"]) == (4, SEED)
    assert {role for role, *_ in model.mxref_handle.context.census} == set(GemmRole)
    scales = [history for name, history in state["fp8"].items() if name.endswith("scale")]
    assert len(scales) == 2 * 5
    assert all(scale[:2].min() > 0 for scale in scales)  # of X and W

    shutil.rmtree(tmp_path / "outputs/checkpoint/step-4")
    again, resumed = train(saving(MIXED, 4))
    assert again == losses[2:]
    assert same(weights(resumed), weights(model))
    assert same(resumed.mxref_handle.state_dict()["fp8"], state["fp8"])

    with pytest.raises(LayerError, match="saved under the recipe"):
        train(saving("mxfp4_h16", 5))
    config = saving("mxfp4_h16", 5)
    config.checkpoint.exclude_from_loading = ["mxref"]
    healed, model = train(config)
    assert len(healed) == 1
    assert model.mxref_handle.step == 5


def test_a_checkpoint_without_the_state_of_the_layers_names_the_way_out(tmp_path: Path) -> None:
    config = saving(MIXED, 2)
    config.model_spec = model_registry("debugmodel")
    del config.model_spec.model.layers[2:]
    cpu_job.attend_on_a_cpu(config.model_spec.model)
    config.checkpoint.last_save_model_only = False
    train_plain = config.build()
    train_plain.train()
    train_plain.close()
    with pytest.raises(LayerError, match="exclude_from_loading"):
        train(saving(MIXED, 3))


def test_a_layer_computes_the_bits_of_a_plain_one_under_fsdp_and_checkpointing() -> None:
    recipe = "tetrajet_style"
    config = job(recipe, 1)
    config.activation_checkpoint, config.training.max_norm = FullAC.Config(), 1e9
    trainer = config.build()
    (model,) = trainer.model_parts
    layers = [module for module in model.modules() if isinstance(module, MXLinear)]
    seen: dict[nn.Module, dict[str, torch.Tensor]] = {layer: {} for layer in layers}

    def ran(layer: nn.Module, inputs: tuple[torch.Tensor], y: torch.Tensor) -> None:
        if seen[layer]:
            return  # the recomputation
        seen[layer] |= {"x": inputs[0].detach().clone(), "w": layer.weight.detach().clone(), "y": y.detach()}
        y.register_hook(lambda dy: seen[layer].update(dy=dy.clone()))

    def stepping(*_: Any) -> None:
        for layer in layers:
            seen[layer]["dw"] = layer.weight.grad.full_tensor().clone()

    for layer in layers:
        layer.register_forward_hook(ran)
    trainer.optimizers.optimizers[0].register_step_pre_hook(stepping)
    trainer.train()
    trainer.close()

    plain = nn.ModuleList(
        nn.Linear(m.in_features, m.out_features, bias=False) for m in [*layers, model.lm_head]
    )
    handle = convert(
        plain, recipe, filter_fn=[str(i) for i in range(len(layers))], backend="numba", seed=SEED
    )
    handle.context.global_tokens = 1 << 30
    for linear, layer in zip(plain, layers, strict=False):
        kept = seen[layer]
        assert kept["w"].dtype is kept["x"].dtype is torch.bfloat16  # of FSDP2's mixed precision
        linear.weight.data.copy_(kept["w"])
        y = linear(kept["x"].requires_grad_())
        y.backward(kept["dy"])
        assert torch.equal(y, kept["y"])
        assert torch.equal(linear.weight.grad.bfloat16().float(), kept["dw"])


def test_compiled_blocks_give_the_losses_of_eager_ones() -> None:
    losses = []
    for compiled in (False, True):
        config = job("tetrajet_style", 2)
        if compiled:
            config.compile = CompileConfig(enable=True, components=["model"], backend="aot_eager")
        losses.append(train(config)[0])
    assert losses[0] == losses[1]
