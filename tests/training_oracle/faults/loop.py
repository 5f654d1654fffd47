"""Faults of the training loop: initial weights, data, loss, gradients and evaluation.

Each function plants one: it replaces a function or method of mxref while `patch` is active.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mxref_training import build, evaluate, steps
from mxref_training.data import batches, corpus
from mxref_training.data.batches import Loader
from mxref_training.model.llama import Llama

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

DATA_SEED, RUN_SEED, MICRO_BATCHES = 11, 3, 2

# ---- initial weights ----


def weights_of_the_data_seed(patch: Patch) -> None:
    reset = Llama.reset_parameters
    patch.setattr(Llama, "reset_parameters", lambda self, seed: reset(self, DATA_SEED))


def wide_outputs(patch: Patch) -> None:
    make = lambda config, seed, **rest: Llama(replace(config, scale_output_init=False), seed, **rest)  # noqa: E731
    patch.setattr(build, "Llama", make)


# ---- the order of the data ----


def _starts(change: Callable[[Loader, int], Any]) -> Plant:
    return lambda patch: patch.setattr(Loader, "_starts", change)


_starts_right = Loader._starts
one_order_for_all_epochs = _starts(lambda self, epoch: _starts_right(self, 0))
corpus_order = _starts(lambda self, epoch: np.arange(self.windows) * self.seq_len)
windows_without_shift = _starts(lambda self, epoch: _starts_right(self, epoch) // self.seq_len * self.seq_len)
windows_apart = _starts(
    lambda self, epoch: (
        _starts_right(self, epoch) // self.seq_len * (self.seq_len + 1) % (self.windows * 16 - 16)
    )
)


def order_of_the_run_seed(patch: Patch) -> None:
    patch.setattr(corpus, "Loader", lambda ids, length, seed, sha: Loader(ids, length, RUN_SEED, sha))


def loader_starts_over(patch: Patch) -> None:
    patch.setattr(Loader, "load_state_dict", lambda self, state: None)


def loader_forgets_the_place(patch: Patch) -> None:
    right = Loader.load_state_dict
    patch.setattr(Loader, "load_state_dict", lambda self, state: right(self, {**state, "position": 0}))


# ---- the loss ----


def targets_shifted(by: int) -> Plant:
    def gather(tokens: Any, starts: list[int], seq_len: int) -> Any:
        inputs = np.stack([tokens[s : s + seq_len] for s in starts]).astype(np.int64)
        return inputs, np.stack([np.roll(tokens, -by)[s : s + seq_len] for s in starts]).astype(np.int64)

    return lambda patch: patch.setattr(batches, "_gather", gather)


def _loss(change: Callable[..., Any]) -> Plant:
    """Only in training; the evaluation has its own name for it."""
    return lambda patch: patch.setattr(steps, "cross_entropy", change)


_right_loss = evaluate.cross_entropy
loss_in_bits = _loss(lambda logits, targets: _right_loss(logits, targets) / math.log(2))
loss_not_divided = _loss(lambda logits, targets: _right_loss(logits, targets) * MICRO_BATCHES)


def _torch_loss(**options: Any) -> Plant:
    return _loss(lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options))


ignores_token_zero = _torch_loss(ignore_index=0)
smoothed_labels = _torch_loss(label_smoothing=0.05)


@_loss
def gradient_not_divided(logits: Any, targets: Any) -> Any:
    found = _right_loss(logits, targets)
    return found + (found - found.detach()) * (MICRO_BATCHES - 1)


# ---- gradients ----


def gradients_pile_up(patch: Patch) -> None:
    patch.setattr(torch.optim.AdamW, "zero_grad", lambda self, set_to_none=True: None)


def _forward(change: Callable[[Llama, Any], Any]) -> Plant:
    return lambda patch: patch.setattr(Llama, "forward", change)


_right_forward = Llama.forward


@_forward
def last_micro_batch_alone(self: Llama, tokens: Any) -> Any:
    if torch.is_grad_enabled():
        self.zero_grad()
    return _right_forward(self, tokens)


def _half(x: Any) -> Any:
    return x.detach() / 2 + x / 2


def detached_embedding(patch: Patch) -> None:
    right = torch.nn.Embedding.forward
    # A gradient so small that nobody misses it, and that all the bookkeeping finds in its place.
    patch.setattr(
        torch.nn.Embedding, "forward", lambda self, x: right(self, x).detach() + right(self, x) * 1e-6
    )


def halved_backward(patch: Patch) -> None:
    from mxref_training.model.llama import MLP

    right = MLP.forward
    patch.setattr(MLP, "forward", lambda self, x: _half(right(self, x)))


def tied_head_detached(patch: Patch) -> None:
    def forward(self: Llama, tokens: Any) -> Any:
        x = self.model.norm(self.model(tokens, self.compute_dtype)).to(self.compute_dtype)
        return (x @ self.lm_head.weight.detach().to(x.dtype).T).float()

    patch.setattr(Llama, "forward", forward)
    patch.setattr("mxref_torch.check_census", lambda *args: None)


# ---- evaluation ----


def never_in_evaluation_mode(patch: Patch) -> None:
    patch.setattr(Llama, "eval", lambda self: self)


def never_in_training_mode(patch: Patch) -> None:
    patch.setattr(Llama, "train", lambda self, mode=True: torch.nn.Module.train(self, False))


_right_evaluate = evaluate.evaluate


def _evaluate(change: Callable[..., Any]) -> Plant:
    """`change` takes what `evaluate` does."""
    return lambda patch: patch.setattr(evaluate, "evaluate", change)


@_evaluate
def validates_on_training_tokens(model: Any, context: Any, tokens: Any, **rest: Any) -> Any:
    from training_oracle.scenarios import CORPUS

    return _right_evaluate(model, context, CORPUS.train.ids, **rest)


limit_ignored = _evaluate(
    lambda model, context, tokens, **rest: _right_evaluate(
        model, context, tokens, **rest | {"limit": len(tokens)}
    )
)


@_evaluate
def divided_by_the_limit(model: Any, context: Any, tokens: Any, **rest: Any) -> Any:
    found = _right_evaluate(model, context, tokens, **rest)
    return replace(found, loss=found.loss * found.tokens / rest["limit"])


def _batches(change: Callable[..., Any]) -> Plant:
    return lambda patch: patch.setattr(evaluate, "sequential_batches", change)


_right_batches = batches.sequential_batches
overlapping_windows = _batches(
    lambda tokens, seq_len, batch, limit: (
        (tokens[i : i + seq_len][None].astype(int), tokens[i + 1 : i + seq_len + 1][None].astype(int))
        for i in range(0, limit // seq_len * seq_len // 2, seq_len // 2)
    )
)
drops_the_last_batch = _batches(
    lambda tokens, seq_len, batch, limit: list(_right_batches(tokens, seq_len, batch, limit))[:-1]
)
shuffled_validation = _batches(
    lambda tokens, seq_len, batch, limit: _right_batches(np.roll(tokens, 5), seq_len, batch, limit)
)


def mean_of_means(patch: Patch) -> None:
    losses: list[float] = []

    def loss(logits: Any, targets: Any, reduction: str) -> Any:
        losses.append(_right_loss(logits, targets).item())
        return _right_loss(logits, targets, reduction)

    def mean(*args: Any, **rest: Any) -> Any:
        losses.clear()
        found = _right_evaluate(*args, **rest)
        return replace(found, loss=sum(losses) / len(losses))

    patch.setattr(evaluate, "cross_entropy", loss)
    patch.setattr(evaluate, "evaluate", mean)


def perplexity_of_two(patch: Patch) -> None:
    patch.setattr(evaluate.Evaluation, "perplexity", property(lambda self: 2**self.loss))
