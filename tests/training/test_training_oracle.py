"""The training layer above the GEMMs against an oracle that shares no code with it, and the oracle's known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mxref_training.config import OptimConfig, Schedule
from mxref_training.data import Loader, sequential_batches
from mxref_training.lab.contrasts import student_point
from mxref_training.lab.measures import first_crossing
from mxref_training.optim import learning_rate
from training_oracle import layer as oracle
from training_oracle import study as study_oracle
from training_oracle.scenarios import SCENARIOS

SCALES = pytest.mark.clause("fp8.delayed", "fp8.scale")
CLAUSES = {
    "fp8": SCALES,
    "history": SCALES,
    "streams": pytest.mark.clause("random.stream", "random.index", "linear.roles"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=CLAUSES.get(name, ())) for name in SCENARIOS])
def test_the_product_follows_the_oracle(tmp_path, name):
    scenario = SCENARIOS[name]
    subject = scenario.make(tmp_path)
    for check in scenario.checks.values():
        check(subject)


# ---- functions, over more values than a run has ----


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("decay_steps", [0, 12, 40])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_learning_rates(schedule, warmup, decay_steps, ratio):
    start = 9 if schedule is Schedule.WSD else None
    config = OptimConfig(
        lr=3e-4,
        warmup=warmup,
        schedule=schedule,
        decay_steps=decay_steps,
        decay_start=start,
        min_lr_ratio=ratio,
    )
    fields = {"lr": 3e-4, "warmup": warmup, "schedule": schedule.value, "min_lr_ratio": ratio, "start": start}
    for step in range(30):
        expected = oracle.learning_rate(step, end=decay_steps or 30, **fields)
        # The cosine is libm's, of which any rounds to within a few units of float64.
        assert learning_rate(config, step, 30) == pytest.approx(expected, rel=1e-13, abs=1e-19), step


@pytest.mark.parametrize(
    ("tokens", "seq_len"), [(17, 16), (18, 16), (210, 16), (223, 16), (100, 1), (1000, 7)]
)
@pytest.mark.parametrize("seed", [0, 5, 2**64 - 1])
def test_the_order_of_the_data(tokens, seq_len, seed):
    ids = np.random.default_rng(tokens).integers(0, 50_000, tokens)
    loader = Loader(ids, seq_len, seed)
    for step in range(12):
        expected = oracle.training_batch(ids, seq_len, seed, 5, step)
        inputs, targets = loader.next_batch(5)
        assert (inputs.tolist(), targets.tolist()) == expected


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
@pytest.mark.parametrize("limit", [16, 31, 32, 100, 208, 209, 10_000])
def test_validation_windows(batch, limit):
    ids = np.random.default_rng(1).integers(0, 50_000, 16 * 13 + 6)
    batches = list(sequential_batches(ids, 16, batch, limit))
    found = tuple([window.tolist() for pair in batches for window in pair[side]] for side in (0, 1))
    assert found == oracle.validation_windows(ids, 16, limit)
    assert [len(inputs) for inputs, _ in batches[:-1]] == [batch] * (len(batches) - 1)


def test_crossings_of_random_curves():
    rng = np.random.default_rng(0)
    reaches = set()
    for _ in range(300):
        losses = np.round(rng.normal(3, 1, rng.integers(1, 8)), 1)  # coarse, so that losses meet the target
        curve = [(100 * (i + 1), float(loss)) for i, loss in enumerate(losses)]
        target = float(np.round(rng.normal(2, 1), 1))
        found = first_crossing(curve, target)
        reach, tokens = study_oracle.crossing(curve, target)
        assert found.reach == reach
        assert found.tokens == pytest.approx(float(tokens), rel=1e-12)
        reaches.add(reach)
    assert reaches == {"first", "crossed", "never"}


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 20])
def test_students_t(freedom):
    assert student_point(0.05, freedom) == pytest.approx(study_oracle.student_t95(freedom), rel=1e-9)


# ---- known answers of the oracle ----


def test_philox_of_the_oracle():
    # The first of Random123's vectors of philox4x64-10.
    assert [f"{word:016x}" for word in oracle.philox4x64(0, (0, 0))] == [
        "16554d9eca36314c", "db20fe9d672d0fdc", "d7e772cee186176b", "7e68b68aec7ba23b",
    ]  # fmt: skip


def test_adamw_of_the_oracle_by_hand():
    state = oracle.AdamW(beta1=0.5, beta2=0.75, eps=1.0, weight_decay=0.1)
    weight, norm = "a.weight", "model.norm.weight"
    gradients = {weight: np.array([2.0]), norm: np.array([2.0])}
    # m = 1 and v = 1, corrected 2 and 4: the update is 2 / (2 + 1); what decays loses 0.3 * 0.1 of 5 first.
    first = state.step({weight: np.array([5.0]), norm: np.array([5.0])}, gradients, 0.3)
    assert first[norm][0] == pytest.approx(5 - 0.2, rel=1e-15)
    assert first[weight][0] == pytest.approx(5 - 0.15 - 0.2, rel=1e-15)
    # m = 0.5 and v = 0.75, corrected 2/3 and 12/7.
    second = state.step(first, {name: np.array([0.0]) for name in gradients}, 0.3)
    assert second[norm][0] == pytest.approx(4.8 - 0.3 * (2 / 3) / (math.sqrt(12 / 7) + 1), rel=1e-15)


def test_loss_of_the_oracle_by_hand():
    logits = np.log(np.array([[1.0, 2.0, 5.0], [4.0, 2.0, 2.0]]))
    assert oracle.token_losses(logits, np.array([2, 1])) == pytest.approx([math.log(8 / 5), math.log(4)])
    assert oracle.logit_gradient(logits, np.array([2, 1]), 4) == pytest.approx(
        np.array([[1, 2, -3], [4, -6, 2]]) / 8 / 4
    )


def test_scales_of_the_oracle_by_hand():
    kept = oracle.Fp8History("x")
    assert kept.in_force(np.float32(7)) == 64
    kept.advance([np.float32(3.5), np.float32(1)])
    assert kept.in_force(np.float32(7)) == 128
    for unusable in ([], [np.float32(0)], [np.float32(np.inf)], [np.float32(1), np.float32(np.nan)]):
        kept.advance(unusable)
        assert kept.scale == 128
