"""Short runs that are compared with the oracle: each takes a second or less, and has named checks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import mxref_torch
from mxref.discovery import get_backend
from mxref.recipe_files import recipe_from_table
from mxref_training.config import ModelConfig, OptimConfig, RunConfig, Schedule, TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.model.llama import Llama
from training_oracle import layer as oracle
from training_oracle import model as model_oracle
from training_oracle.checks import FP8, OPTIMIZATION
from training_oracle.ladder import STUDY, study
from training_oracle.recording import Call, Recorder, Recording, record
from training_setup import VOCAB, Vocabulary, text

CORPUS = TokenCorpus(text(16 * 13 + 6, 1), text(300, 2), Vocabulary(), "made up")  # type: ignore[arg-type]
"""13 windows and 5 tokens to spare, so that ten steps of four samples see four epochs begin."""
CONFIG = TrainConfig(
    model=ModelConfig(
        layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=VOCAB, max_seq=16, init_std=0.08, norm_eps=1e-3
    ),
    optim=OptimConfig(
        lr=4e-3,
        beta1=0.8,
        beta2=0.9,
        eps=1e-3,
        weight_decay=0.3,
        clip=1.7,
        warmup=3,
        schedule=Schedule.COSINE,
        min_lr_ratio=0.2,
        decay_steps=8,
    ),
    # 90 validation tokens are five whole windows: batches of 2, 2 and 1.
    run=RunConfig(
        steps=10,
        batch=4,
        micro_batch=2,
        seq_len=16,
        eval_every=4,
        eval_tokens=90,
        seed=3,
        data_seed=11,
        threads=1,
        keep=9,
    ),
)


def optimization(folder: Path) -> Recording:
    """BF16, stopped and resumed once, over several epochs."""
    return record(folder, "bf16", CONFIG, CORPUS, stops=(5,))


def tied(folder: Path) -> Recording:
    """Tied embeddings, a cosine that ends with the run, no warm-up, one micro-batch."""
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, tie_embeddings=True, scale_output_init=False),
        optim=replace(CONFIG.optim, warmup=0, decay_steps=0),
        run=replace(CONFIG.run, steps=4, micro_batch=0),
    )
    return record(folder, "bf16", config, CORPUS)


def fp8(folder: Path) -> Recording:
    """FP8 with delayed scaling, resumed once; the loss of one step and the gradient of another are NaN."""
    config = replace(
        CONFIG, optim=replace(CONFIG.optim, schedule=Schedule.CONSTANT), run=replace(CONFIG.run, steps=8)
    )
    spoiled = Recorder({2: "loss", 5: "gradient"})
    return record(folder, "fp8", config, CORPUS, stops=(4,), recorder=spoiled)


# ---- random streams and treatments ----

SR = recipe_from_table(
    {
        "dialect": "amd",
        "gemm": "ordered",
        "fprop": {"x": {"scale_rule": "rceil"}, "w": {"scale_rule": "ceil"}},
        "dgrad": {"dy": {"rounding": "sr", "sr_bits": 8}, "w": {"rounding": "rtz"}},
        "wgrad": {"dy": {"rounding": "sr", "sr_bits": 9}, "x": {"rounding": "sr", "sr_bits": 11}},
    }
)
TREATMENTS = {
    0: ("rceil", "rne"), 1: ("ceil", "rne"), 2: ("even", "sr", 8), 3: ("even", "rtz"), 4: ("even", "sr", 9),
    5: ("even", "sr", 11),
}  # fmt: skip
"""Of the operands, by the number that the random streams give them (clause random.stream)."""
AXES = {0: 1, 1: 1, 2: 1, 3: 0, 4: 0, 5: 0}


def streams(folder: Path) -> Recording:
    """MXFP4, every operand in a treatment of its own, with a backend that notes what it is asked for."""
    config = replace(
        CONFIG,
        model=ModelConfig(layers=1, width=32, heads=2, kv_heads=2, ffn=32, vocab=VOCAB, max_seq=16),
        run=replace(CONFIG.run, steps=3, eval_every=3, seq_len=16),
    )
    return record(folder, SR, config, CORPUS, recorder=Recorder(gradients=False), watched=True)


def treatments(r: Recording) -> None:
    """Every operand of every layer but lm_head is quantized once in its own treatment, along its own axis."""
    assert r.names[-1] == "lm_head"
    run = r.config.run
    for number in range(run.steps):
        calls = [c for c in r.calls if c.phase == "train" and c.step == number]
        for call in calls:
            wanted = TREATMENTS[call.stream.operand]
            treatment = call.spec.scale_rule.value, call.spec.rounding.value, call.spec.sr_bits
            assert treatment[: len(wanted)] == wanted, (
                f"operand {call.stream.operand} of layer {call.stream.layer}"
            )
            assert call.axis == AXES[call.stream.operand]
        micro_batches = run.batch // run.micro_batch
        per_operand = {0: micro_batches, 1: 1, 2: micro_batches, 3: 1, 4: micro_batches, 5: micro_batches}
        layers = len(r.names) - 1
        counts = {o: sum(TREATMENTS[o] == _treatment(c) for c in calls) for o in TREATMENTS}
        assert counts == {o: layers * n for o, n in per_operand.items()}, f"step {number}"


def _treatment(call: Call) -> tuple[Any, ...]:
    kept = call.spec.scale_rule.value, call.spec.rounding.value, call.spec.sr_bits
    return kept[: 3 if kept[1] == "sr" else 2]


def random_streams(r: Recording) -> None:
    """Each operand that draws does so by the run's seed, the step, its layer's index and its own number."""
    drawn = [c for c in r.calls if c.phase == "train" and c.spec.rounding.value == "sr"]
    for call in drawn:
        assert (call.stream.seed, call.stream.step) == (r.config.run.seed, call.step)
    operands = {(c.step, c.stream.layer, c.stream.operand) for c in drawn}
    layers, numbers = range(len(r.names) - 1), [o for o, treatment in TREATMENTS.items() if "sr" in treatment]
    expected = {(s, layer, o) for s in range(r.config.run.steps) for layer in layers for o in numbers}
    assert operands == expected


def random_places(r: Recording) -> None:
    """Under SR a micro-batch's first row is that of its first token in the step, and rows are counted over the step."""
    run = r.config.run
    rounded = [c for c in r.calls if c.phase == "train" and c.spec.rounding.value == "sr"]
    assert {c.forward for c in rounded} == {0, 1}
    for call in rounded:
        first = call.forward * run.micro_batch * run.seq_len
        assert call.origin == (first, 0), f"micro-batch {call.forward}"
        assert call.global_shape == (run.batch * run.seq_len, call.shape[1])


# ---- FP8's history in a loop of one's own ----

LAYERS = ("first", "second")
AMAXES: list[list[tuple[str, float, float]]] = [
    [("first", 3.0, 0.5)],
    [("first", 5.0, 0.25), ("second", 7.0, 0.1), ("first", 4.0, 0.75)],
    [("second", 0.0, 0.0)],
    [("first", 2.0, float("nan")), ("first", 6.0, 0.5), ("second", float("inf"), 1.0)],
    [],
    [("first", 1.0, 9.0), ("second", 11.0, 3.0)],
    [("second", 13.0, 0.01)],
]
"""Steps of micro-batches: the layer that each goes through, and the amax of its X and of its dY."""


@dataclass
class History:
    found: list[dict[tuple[str, str], float]]
    """Scales after each step."""
    expected: list[dict[tuple[str, str], float]]


def history(folder: Path) -> History:
    """Two layers of which a step runs one, both or none, with an evaluation and a step that is done over."""
    model = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in LAYERS})
    generator = torch.Generator().manual_seed(0)
    for layer in model.values():
        nn.init.normal_(layer.weight, generator=generator)
    recipe = recipe_from_table({"all": {"format": "fp8"}, "keep_bf16": []})
    context = mxref_torch.convert(model, recipe, backend=get_backend("reference"), seed=0).context
    kept = {(layer, tensor): oracle.Fp8History(tensor) for layer in LAYERS for tensor in oracle.FP8_MAX}
    out = History([], [])
    for step, micro_batches in enumerate(AMAXES):
        context.step = step
        if micro_batches:
            _pass(model, micro_batches[0][0], 1e4, 1e4)
            mxref_torch.restart(model)
        seen: dict[tuple[str, str], list[np.float32]] = {}
        for layer, x, dy in micro_batches:
            with torch.no_grad():
                model[layer](torch.full((2, 32), 1e6))
            _pass(model, layer, x, dy)
            w = oracle.amax(model[layer].weight.detach().numpy())
            for tensor, amax in zip(oracle.FP8_MAX, (x, w, dy), strict=True):
                seen.setdefault((layer, tensor), []).append(np.float32(amax))
        with torch.no_grad():
            for layer in model.values():
                layer.weight.mul_(1.5)
        with warnings.catch_warnings():
            # The first step leaves a layer out, which the product warns of.
            warnings.filterwarnings("ignore", "converted layers that never ran", UserWarning)
            mxref_torch.advance(model)
        for key, one in kept.items():
            one.advance(seen.get(key, []))
        out.expected.append({key: float(one.scale or 0) for key, one in kept.items()})
        scales = {layer: model[layer].fp8.scale.tolist() for layer in LAYERS}
        out.found.append(
            {
                (layer, tensor): s
                for layer in LAYERS
                for tensor, s in zip(oracle.FP8_MAX, scales[layer], strict=True)
            }
        )
    return out


def _pass(model: nn.ModuleDict, layer: str, x: float, dy: float) -> None:
    inputs = torch.linspace(-1, 0.5, 64).reshape(2, 32) * torch.tensor(1.0)
    inputs = torch.where(inputs == -1, -x, inputs * (x if np.isfinite(x) else 1.0)).requires_grad_()
    gradient = torch.linspace(-0.5, 1, 64).reshape(2, 32)
    gradient = torch.where(gradient == 1, dy, gradient * (dy if np.isfinite(dy) else 1.0))
    model[layer](inputs).backward(gradient)


def fp8_history(h: History) -> None:
    """A tensor that a step did not see keeps its scale, and so does one whose amax is 0, Inf or NaN."""
    for step, (found, expected) in enumerate(zip(h.found, h.expected, strict=True)):
        assert found == expected, f"after step {step}"


# ---- the model ----


@dataclass
class Forwards:
    found: oracle.Array
    expected: oracle.Array


def forward(folder: Path) -> Forwards:
    """The product's model in float32, before its layers are converted, with weights so large that nothing is linear."""
    config = replace(CONFIG.model, init_std=0.4, rope_theta=300.0, norm_eps=0.05, max_seq=24)
    model = Llama(config, seed=1, compute_dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if oracle.is_norm(name):
                parameter.uniform_(0.5, 1.5, generator=generator)
        tokens = torch.randint(0, VOCAB, (3, 24), generator=generator)
        found = model(tokens).numpy()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    shape = model_oracle.Shape(
        config.layers, config.heads, config.kv_heads, config.rope_theta, config.norm_eps
    )
    return Forwards(found, model_oracle.logits(weights, tokens.tolist(), shape))


def logits(f: Forwards) -> None:
    """Float32 has an error of about 2^-20 of the largest logit after two layers, in any order of a BLAS's additions."""
    np.testing.assert_allclose(f.found, f.expected, rtol=0, atol=2.0**-14 * np.abs(f.expected).max())


@dataclass(frozen=True)
class Scenario:
    """What is run, and the checks that are made of it, in the order in which a run computes."""

    make: Callable[[Path], Any]
    checks: Mapping[str, Callable[[Any], None]]

    def first_failing(self, subject: Any) -> str | None:
        """Name of the first check that fails."""
        for name, check in self.checks.items():
            try:
                check(subject)
            except AssertionError:
                return name
        return None


def _named(*checks: Callable[[Any], None]) -> dict[str, Callable[[Any], None]]:
    return {check.__name__: check for check in checks}


SCENARIOS = {
    "optimization": Scenario(optimization, OPTIMIZATION),
    "tied": Scenario(tied, OPTIMIZATION),
    "fp8": Scenario(fp8, FP8),
    "streams": Scenario(streams, _named(treatments, random_streams, random_places)),
    "history": Scenario(history, _named(fp8_history)),
    "forward": Scenario(forward, _named(logits)),
    "study": Scenario(study, STUDY),
}
