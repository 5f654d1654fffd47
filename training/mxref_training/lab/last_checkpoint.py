"""More evaluations of a run's last checkpoint: on other text, by its source, and with the GEMMs of other recipes.

They are made when a run ends and stand in its result, so no checkpoint has to be kept for them. Nothing of the run
depends on them: they are no part of its fingerprint, and its own losses are those of its log.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import mxref_torch
from mxref.backend import Backend, within_range
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref.tomlio import to_table
from mxref_torch.conversion.convert import require_supported
from mxref_torch.optimizer_step import load_fp8_history
from mxref_training.checkpoint import CheckpointStore
from mxref_training.config import RunConfig, TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.data.documents import iter_labelled, survey
from mxref_training.data.megatron import IndexedTokens
from mxref_training.data.tokens import Tokens, tokenize
from mxref_training.device import choose_device, deterministic, fixed_choices
from mxref_training.errors import ConfigError
from mxref_training.evaluate import Evaluation, evaluate
from mxref_training.failures import known_errors
from mxref_training.model.llama import Llama
from mxref_training.run_state import load_weights
from mxref_training.wording import counted

# `build` only knows plain `dict`.
if TYPE_CHECKING:
    Table = dict[str, Any]
else:
    Table = dict

VALIDATION = "validation"
"""Name of the run's own validation text, as far as the run evaluates it."""
OWN = "own"
"""Name of the run's own recipe."""
UNLABELLED = "other"
"""Name of the documents without a field `source`."""


@dataclass(frozen=True)
class Extra:
    """The texts and recipes of the last checkpoint's evaluations, by name; none by default."""

    texts: Table = field(default_factory=dict)
    """Tokens as `Tokens.to_table` describes them."""
    recipes: Table = field(default_factory=dict)
    """Recipes as tables."""

    def __bool__(self) -> bool:
        return bool(self.texts or self.recipes)


def prepare(
    paths: Sequence[str], recipes: Sequence[str], config: TrainConfig, corpus: TokenCorpus, backend: Backend
) -> Extra:
    """Return the evaluations that JSONL files, folders or patterns and names or files of recipes define.

    The text is tokenized by the tokenizer of the runs, and cached.

    Raises:
        DataError: a file is missing or damaged.
        ConfigError: a source has too few tokens for one sequence, or is the training text; a name that the run's own
            recipe or text has, or two recipes of one name.
        MxrefError: a recipe that cannot be read, or that the backend does not declare.
    """
    texts: dict[str, list[str]] = {}
    for path in paths:
        for text, source in iter_labelled(path):
            texts.setdefault(source or UNLABELLED, []).append(text)
    found = {
        name: tokenize(survey(name, partial(iter, own)), corpus.tokenizer) for name, own in texts.items()
    }
    for name, tokens in found.items():
        if name == VALIDATION:
            raise ConfigError(
                f"last.val has a source {name!r}, which is the name of the run's own text: rename it"
            )
        if tokens.sha256 == corpus.train.sha256:
            raise ConfigError(f"last.val: {name} is the training text; give text that is held out")
        if len(tokens) <= config.run.seq_len:
            raise ConfigError(
                f"last.val: {name} has {counted(len(tokens), 'token')}, and one sequence needs "
                f"{config.run.seq_len + 1:,}: give more text of this source, or lower run.seq_len"
            )
    asked: Table = {}
    for path in recipes:
        name = Path(path).stem
        if name in asked or name == OWN:
            raise ConfigError(
                f"last.recipes: {path}: another recipe is named {name!r} already; rename the file"
            )
        recipe = load_recipe(path)
        for treatment in recipe.treatments():
            require_supported(backend, treatment)
        asked[name] = to_table(recipe)
    return Extra({name: tokens.to_table() for name, tokens in found.items()}, asked)


def evaluate_last(
    config: TrainConfig, recipe: Recipe, folder: Path, extra: Extra, *, backend: Backend, corpus: TokenCorpus
) -> dict[str, Any]:
    """Return the losses of a run's newest checkpoint by recipe and text, and what each text is.

    Fprop runs as in the run's own evaluations, without a compiler. Other recipes than the run's own have no history of
    FP8's scales: each tensor takes the scale of its own largest magnitude.

    Raises:
        CheckpointError: the checkpoint is damaged.
        MxrefError: a recipe that does not fit the model, or that the backend does not declare.
    """
    release(backend)
    store = CheckpointStore(folder / "checkpoints", config.run.keep)
    snapshot = store.load(store.latest() or 0, ("model",))
    texts = {VALIDATION: corpus.val} | {name: Tokens.from_table(side) for name, side in extra.texts.items()}
    recipes = {OWN: recipe} | {name: recipe_from_table(table) for name, table in extra.recipes.items()}
    device, run = choose_device(config.run.device, backend), config.run
    losses: dict[str, dict[str, float]] = {}
    with (
        deterministic(device, run.threads),
        fixed_choices(config, backend, device),
        known_errors("lower --jobs, or leave last.val and last.recipes out"),
    ):
        for name, treatment in recipes.items():
            model = Llama(config.model, device=device)
            handle = mxref_torch.convert(model, treatment, backend=backend, seed=run.seed, steps=run.steps)
            handle.context.step = snapshot.step - 1  # the recipe is that of the last step's phase
            history = load_weights(model, snapshot)
            if name == OWN:
                load_fp8_history(model, history)
            losses[name] = {
                text: _loss(model, handle.context, backend, run, tokens, text == VALIDATION)
                for text, tokens in texts.items()
            }
    facts = {name: {"tokens": len(tokens), "sha256": tokens.sha256} for name, tokens in texts.items()}
    digests = {name: treatment.digest for name, treatment in recipes.items()}
    return {"step": snapshot.step, "texts": facts, "recipes": digests, "losses": losses}


def _loss(
    model: Llama,
    context: mxref_torch.StepContext,
    backend: Backend,
    run: RunConfig,
    tokens: Tokens | IndexedTokens,
    own: bool,
) -> float:
    """Return the loss on the run's own validation text as far as the run evaluates it, or on the whole of another."""
    limit = run.eval_tokens if own else len(tokens)

    def work() -> Evaluation:
        found = evaluate(model, context, tokens.ids, seq_len=run.seq_len, batch=run.sequences, limit=limit)
        mxref_torch.restart(model)
        return found

    loss: float = within_range(backend, work).loss
    return loss


def release(backend: Backend) -> None:
    """Release what training has left in this process: models, CUDA graphs, compiled code, the flag of exceeded range.

    Compiled kernels, and what compilers keep on the disk, stay.
    """
    if "torch._dynamo" in sys.modules:  # importing it takes a second
        torch.compiler.reset()
    # A model, its hooks and its captured steps refer to each other.
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    # Training that ended within a step has not read the flag, and what follows would repeat its first step.
    backend.range_exceeded()
