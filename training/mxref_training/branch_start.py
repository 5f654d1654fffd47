"""A run that goes on from a checkpoint of another run, under a recipe of its own."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

import mxref_torch
from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.optimizer_step import fp8_history
from mxref_training.checkpoint import CheckpointStore, Snapshot
from mxref_training.config import TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.device import choose_device
from mxref_training.environment import device_name
from mxref_training.identity import identity, run_facts
from mxref_training.model.llama import Llama
from mxref_training.run_folder import RunFolder


def begin_branch(
    config: TrainConfig,
    recipe: Recipe,
    out: Path,
    *,
    backend: Backend,
    corpus: TokenCorpus,
    label: str,
    trunk: Path,
    step: int,
) -> None:
    """Make `out` the folder of a run that has taken its first steps as another run did, unless it is one.

    Weights, optimizer, random generators and the place in the data are those of the other run. So is the history of
    FP8's scales, for layers that multiply in FP8 under both recipes. A layer that does so only here begins without.
    `mxref_training.trainer.train` then goes on from there.

    Args:
        config: the run, with the model, seeds and data of the other one.
        recipe: treatment of the linear layers from there on.
        out: folder of the new run.
        backend: computes the block formats.
        corpus: the tokens of both runs.
        label: name of the run in progress reports.
        trunk: folder of the other run, which has a checkpoint of the step.
        step: the step of the checkpoint.

    Raises:
        CheckpointError: the other run's checkpoint is missing or damaged, `out` holds another run, or it cannot be
            written.
        ConfigError: another process trains in `out`.
    """
    folder = RunFolder(out, config.run.keep)
    with folder.alone():
        wanted = identity(config, recipe, backend, corpus)
        record = folder.record()
        if record is not None:
            folder.require(wanted, record["identity"])
        else:
            origin = {"branch": {"trunk": str(trunk), "step": step}}
            device = device_name(choose_device(config.run.device, backend))
            facts = run_facts(
                config, backend, corpus, digest=recipe.digest, label=label, wanted=wanted, device=device
            )
            folder.create(facts | origin)
        if folder.store.latest() is None:
            source = CheckpointStore(trunk / "checkpoints", keep=1).load(step)
            folder.store.save(_branched(source, config, recipe, backend, wanted))


def _branched(
    source: Snapshot, config: TrainConfig, recipe: Recipe, backend: Backend, wanted: dict[str, object]
) -> Snapshot:
    """Return a checkpoint as the run's own, without logs and with the history of the recipe's own FP8 layers."""
    weights = {name: tensor for name, tensor in source.tensors["model"].items() if ".fp8." not in name}
    history = _fresh_history(config, recipe, backend, source.step)
    kept = {name: source.tensors["model"].get(name, tensor) for name, tensor in history.items()}
    facts = {"skipped_in_a_row": source.state["skipped_in_a_row"], "loader": source.state["loader"]}
    return Snapshot(
        source.step, {**source.tensors, "model": weights | kept}, {**facts, "logs": {}, "identity": wanted}
    )


def _fresh_history(config: TrainConfig, recipe: Recipe, backend: Backend, step: int) -> dict[str, Tensor]:
    """Return the history that the recipe's layers have at a step before they have seen a tensor."""
    model = Llama(config.model, device="meta")
    handle = mxref_torch.convert(model, recipe, backend=backend, seed=config.run.seed, steps=config.run.steps)
    handle.context.step = max(0, step - 1)  # a checkpoint has the FP8 layers of its phase
    for module in model.modules():
        if isinstance(module, Fp8Scales):
            module.to_empty(device="cpu")
            module.reset_parameters()
    return fp8_history(model)
