"""An independent implementation, Transformers' Llama in float32, follows a BF16 run from one of its checkpoints.

From mxref it takes only the checkpoint. The model is Transformers', the optimizer and the clipping are written here,
and the order of the data follows its description (`training_oracle`). The remaining difference is BF16's rounding
before and after each GEMM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mxref_training.config import ModelConfig, OptimConfig, RunConfig, Schedule, TrainConfig
from mxref_training.data.corpus import TokenCorpus
from training_oracle import layer as oracle
from training_setup import VOCAB, Vocabulary, lines, run, text

START, STEPS = 20, 50
CONFIG = TrainConfig(
    # Wide initial weights and short wavelengths: positions matter from the first step on.
    model=ModelConfig(
        layers=2,
        width=64,
        heads=4,
        kv_heads=2,
        ffn=128,
        vocab=VOCAB,
        max_seq=32,
        init_std=0.08,
        rope_theta=100.0,
    ),
    optim=OptimConfig(
        lr=7e-4, weight_decay=0.5, warmup=10, schedule=Schedule.COSINE, decay_steps=60, clip=0.5
    ),
    run=RunConfig(
        steps=START + STEPS,
        batch=32,
        micro_batch=16,
        seq_len=32,
        eval_every=START + STEPS,
        eval_tokens=1500,
        seed=5,
        data_seed=6,
        threads=1,
    ),
)
CORPUS = TokenCorpus(text(6000, 1), text(2000, 2), Vocabulary(), "made up")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Settings:
    """What the witness takes from the run's configuration; a test changes one at a time."""

    theta: float = CONFIG.model.rope_theta
    beta2: float = CONFIG.optim.beta2
    norms_decay: bool = False
    data_seed: int = 6
    clip: float = CONFIG.optim.clip


def model_of(tensors: dict[str, torch.Tensor], settings: Settings) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    m = CONFIG.model
    config = LlamaConfig(
        hidden_size=m.width,
        intermediate_size=m.ffn,
        num_hidden_layers=m.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads,
        vocab_size=m.vocab,
        max_position_embeddings=m.max_seq,
        rms_norm_eps=m.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": settings.theta},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(tensors)
    return model


def losses(model: Any, windows: tuple[list[list[int]], list[list[int]]]) -> torch.Tensor:
    """Mean loss over the tokens of all windows."""
    inputs, targets = (torch.tensor(side) for side in windows)
    found: torch.Tensor = torch.nn.CrossEntropyLoss()(model(inputs).logits.flatten(0, 1), targets.flatten())
    return found


def witness(folder: Path, settings: Settings) -> tuple[list[float], float]:
    """Training losses of the steps from the checkpoint on, and the validation loss after them."""
    model = model_of(load_file(folder / "model.safetensors"), settings)
    saved = load_file(folder / "optimizer.safetensors")
    first, second = (
        {name: saved[f"{kind}/{name}"].clone() for name, _ in model.named_parameters()}
        for kind in ("exp_avg", "exp_avg_sq")
    )
    o, r = CONFIG.optim, CONFIG.run
    found = []
    for step in range(START, START + STEPS):
        model.zero_grad()
        loss = losses(
            model, oracle.training_batch(CORPUS.train.ids, r.seq_len, settings.data_seed, r.batch, step)
        )
        loss.backward()
        found.append(loss.item())
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
        factor = min(1.0, settings.clip / norm)
        progress = min(1.0, (step - o.warmup) / (o.decay_steps - o.warmup))
        lr = o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = p.grad * factor
                first[name] = o.beta1 * first[name] + (1 - o.beta1) * g
                second[name] = settings.beta2 * second[name] + (1 - settings.beta2) * g * g
                m = first[name] / (1 - o.beta1 ** (step + 1))
                v = second[name] / (1 - settings.beta2 ** (step + 1))
                decay = o.weight_decay if settings.norms_decay or p.ndim == 2 else 0.0
                p -= lr * (m / (v.sqrt() + o.eps) + decay * p)
    with torch.no_grad():
        return found, losses(
            model, oracle.validation_windows(CORPUS.val.ids, r.seq_len, r.eval_tokens)
        ).item()


# Rounding to BF16 (2^-9) moves each token's loss at random by some 2^-8 or less, and a step's loss is the mean of 1,024
# tokens. Measured: 1.2e-4 on average, 3.3e-4 at most, 2e-6 on 1,472 validation tokens. Another processor rounds other
# sums, so it draws this noise anew at the same size; three times the measured size holds on any.
MEAN, LARGEST, VALIDATION = 4e-4, 1e-3, 1e-4


@pytest.fixture(scope="module")
def bf16_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("witness")
    for stop in (START, None):
        run(folder, "bf16", CONFIG, corpus=CORPUS, stop_after=stop)
    return folder


def distances(folder: Path, settings: Settings) -> tuple[float, float, float]:
    """Mean and largest distance of the training losses, and that of the validation losses."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found, validation = witness(folder / f"checkpoints/step-{START}", settings)
    finally:
        torch.set_num_threads(threads)
    ours = [line["loss"] for line in lines(folder) if "lr" in line][START:]
    logged = next(line["val_loss"] for line in lines(folder) if "val_loss" in line)
    apart = [abs(a - b) for a, b in zip(found, ours, strict=True)]
    return sum(apart) / len(apart), max(apart), abs(validation - logged)


def test_transformers_in_float32_follows_our_bf16_run(bf16_run: Path) -> None:
    mean, largest, validation = distances(bf16_run, Settings())
    assert mean < MEAN
    assert largest < LARGEST
    assert validation < VALIDATION
    losses = [line["loss"] for line in lines(bf16_run) if "lr" in line]
    assert losses[START] - losses[-1] > 0.5, "there was something to follow"


@pytest.mark.parametrize(
    "departure",
    [{"theta": 10000.0}, {"norms_decay": True}, {"data_seed": 5}, {"clip": 0.55}],
    ids=lambda departure: next(iter(departure)),
)
def test_a_witness_of_another_run_is_told_apart(bf16_run: Path, departure: dict[str, Any]) -> None:
    mean, _, _ = distances(bf16_run, Settings(**departure))
    assert mean > 4 * MEAN
