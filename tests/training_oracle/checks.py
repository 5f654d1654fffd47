"""Checks of a recorded run, each with a name. Each check reads the recorded upstream values, so a fault shows first in
the check of its own stage.

Only float32's rounding inside PyTorch is allowed, and only there:
`REDUCED` for a float32 sum of at most 100 terms, of any order (100 * 2^-24 = 6e-6); `FEW` for a handful of float32
operations on one value.
"""

from __future__ import annotations

import numpy as np
import torch

from mxref_training.config import Schedule
from training_oracle import layer as oracle
from training_oracle import model as model_oracle
from training_oracle.recording import Recording, Step

REDUCED = 1e-5
FEW = 2.0**-20


def assert_close(got: object, expected: object, tolerance: float, what: str) -> None:
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=0, err_msg=what)


def batch_of(r: Recording, step: int) -> tuple[list[list[int]], list[list[int]]]:
    run = r.config.run
    seed = run.seed if run.data_seed is None else run.data_seed
    return oracle.training_batch(r.corpus.train.ids, run.seq_len, seed, run.batch, step)


def shape_of(r: Recording) -> model_oracle.Shape:
    m = r.config.model
    return model_oracle.Shape(m.layers, m.heads, m.kv_heads, m.rope_theta, m.norm_eps)


def initial_weights(r: Recording) -> None:
    """Normal numbers of the run's seed, narrower where a layer writes to the residual stream; norms one."""
    generator = torch.Generator().manual_seed(r.config.run.seed)
    m = r.config.model
    for name, found in r.steps[0].before.items():
        expected = torch.ones(found.shape)
        if not oracle.is_norm(name):
            narrow = m.scale_output_init and name.split(".")[-2] in ("o_proj", "down_proj")
            expected.normal_(
                0, m.init_std / (2 * m.layers) ** 0.5 if narrow else m.init_std, generator=generator
            )
        np.testing.assert_array_equal(found, expected.numpy(), err_msg=name)


def data_order(r: Recording) -> None:
    """Every step reads the samples that the description gives it, also after a resumption."""
    for number, step in enumerate(r.steps):
        seen = np.concatenate([forward.inputs for forward in step.forwards])
        np.testing.assert_array_equal(seen, batch_of(r, number)[0], err_msg=f"step {number}")


def training_loss(r: Recording) -> None:
    """The logged loss is the mean over the tokens of the whole step, of the logits that were recorded."""
    for number, line in enumerate(line for line in r.log if "lr" in line):
        logits = np.concatenate([forward.logits for forward in r.steps[number].forwards])
        expected = oracle.token_losses(logits, np.array(batch_of(r, number)[1])).mean()
        assert_close(line["loss"], expected, REDUCED, f"step {number}")


def accumulation(r: Recording) -> None:
    """Each micro-batch's logits get the gradient of the mean over the whole step."""
    for number, step in enumerate(r.steps):
        targets = np.array(batch_of(r, number)[1])
        logits = np.concatenate([forward.logits for forward in step.forwards])
        found = np.concatenate(
            [forward.gradient for forward in step.forwards if forward.gradient is not None]
        )
        expected = oracle.logit_gradient(logits, targets, targets.size)
        np.testing.assert_allclose(found, expected, rtol=0, atol=REDUCED / targets.size)


SLOPE = 0.03
"""BF16 rounds every operand of a GEMM by up to 2^-9 (0.2 %), and a handful follow each other; measured: below 0.6 %.
A gradient that is added twice, lost or not divided differs by a third at least."""


def gradient(r: Recording) -> None:
    """Along each parameter's summed gradient, the loss of the whole step changes at the rate of its length."""
    for number in (1, len(r.steps) - 1):
        step, batch = r.steps[number], batch_of(r, number)
        assert set(step.raw) == set(step.before)
        for name, found in step.raw.items():
            slope = model_oracle.slope(step.before, name, found, batch, shape_of(r))
            assert_close(np.linalg.norm(found), slope, SLOPE, f"{name} in step {number}")


def clipping(r: Recording) -> None:
    """All gradients are scaled alike when their common norm is above the limit; the norm before is what is logged."""
    limit, clipped = r.config.optim.clip, set()
    for step, line in zip(r.steps, (line for line in r.log if "lr" in line), strict=True):
        norm = oracle.global_norm(step.raw)
        assert_close(line["grad_norm"], norm, REDUCED, "logged norm")
        factor = oracle.clip_factor(norm, limit)
        clipped.add(factor < 1)
        for name, found in step.clipped.items():
            # PyTorch adds 1e-6 to the norm, lest it divide by 0.
            assert_close(found, step.raw[name] * factor, REDUCED + 1e-6 / norm, name)
    assert clipped == {True, False} or not limit, "the run has steps of both kinds"


def schedule(r: Recording) -> None:
    """Each step has its learning rate, in the log and for every parameter alike."""
    optim = r.config.optim
    for number, line in enumerate(line for line in r.log if "lr" in line):
        expected = oracle.learning_rate(
            number,
            lr=optim.lr,
            warmup=optim.warmup,
            schedule=optim.schedule.value,
            min_lr_ratio=optim.min_lr_ratio,
            end=optim.decay_steps or r.config.run.steps,
        )
        assert_close(line["lr"], expected, 1e-14, f"step {number}")  # the cosine is libm's, in float64
        step = r.steps[number]
        assert set(step.rates) == (set(step.before) if step.clipped else set())
        for name, rate in step.rates.items():
            assert_close(rate, expected, 1e-14, f"{name} in step {number}")
    assert optim.schedule is Schedule.CONSTANT or optim.warmup < len(r.steps)


def adamw(r: Recording) -> None:
    """Weights after each step, and both moments in every checkpoint, follow from the clipped gradients."""
    optim = r.config.optim
    state = oracle.AdamW(optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
    for number, step in enumerate(r.steps):
        if step.clipped:
            lr = next(iter(step.rates.values()))
            for name, expected in state.step(step.before, step.clipped, lr).items():
                root = np.sqrt(state.second[name] / (1 - optim.beta2**state.steps))
                # The first moment's terms may cancel: its rounding scales with the largest of them.
                rounding = 4 * FEW * lr * state.largest[name] / (root + optim.eps)
                allowed = rounding + FEW * np.abs(step.before[name])
                off = np.abs(step.after[name] - expected)
                assert (off <= allowed).all(), (
                    f"{name} in step {number}: off by {(off / allowed).max():.1f} bounds"
                )
        if (r.folder / f"checkpoints/step-{number + 1}").exists():
            _moments(r, state, number + 1)


def _moments(r: Recording, state: oracle.AdamW, step: int) -> None:
    saved = r.tensors(step, "optimizer")
    assert set(saved) == {
        f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq", "step") for name in state.first
    }
    for name, largest in state.largest.items():
        for kind, expected, terms in (
            ("exp_avg", state.first, largest),
            ("exp_avg_sq", state.second, largest**2),
        ):
            off = np.abs(saved[f"{kind}/{name}"] - expected[name])
            assert (off <= 4 * FEW * terms).all(), f"{kind} of {name} after {step} steps"
        assert saved[f"step/{name}"] == state.steps


def standstill(r: Recording) -> None:
    """A step whose loss or gradient is not finite changes no weight, and the log says so."""
    spoiled = [number for number, step in enumerate(r.steps) if not _finite(step)]
    assert spoiled, "the run has such steps"
    assert [line["step"] - 1 for line in r.log if "skipped" in line] == spoiled
    assert [number for number, step in enumerate(r.steps) if not step.clipped] == spoiled
    for number in spoiled:
        for name, after in r.steps[number + 1].before.items():
            np.testing.assert_array_equal(after, r.steps[number].before[name], err_msg=name)


def _finite(step: Step) -> bool:
    arrays = [*(forward.logits for forward in step.forwards), *step.raw.values()]
    return all(np.isfinite(array).all() for array in arrays)


def evaluation_mode(r: Recording) -> None:
    """Evaluations run the model in evaluation mode, training steps in training mode."""
    assert all(forward.training for step in r.steps for forward in step.forwards)
    assert not any(forward.training for seen in r.evaluations.values() for forward in seen)


def validation(r: Recording) -> None:
    """The logged loss is the mean over all tokens of the first whole validation windows."""
    run = r.config.run
    inputs, targets = oracle.validation_windows(r.corpus.val.ids, run.seq_len, run.eval_tokens)
    logged = {line["step"]: line["val_loss"] for line in r.log if "val_loss" in line}
    due = [n for n in range(1, run.steps + 1) if n % run.eval_every == 0 or n == run.steps]
    assert sorted(logged) == due
    for step, found in logged.items():
        seen = r.evaluations[step]
        np.testing.assert_array_equal(np.concatenate([forward.inputs for forward in seen]), inputs)
        logits = np.concatenate([forward.logits for forward in seen])
        assert_close(found, oracle.token_losses(logits, np.array(targets)).mean(), REDUCED, f"step {step}")


def log(r: Recording) -> None:
    """Steps and tokens are counted from the start of the run; perplexity is e to the loss."""
    run = r.config.run
    assert [line["step"] for line in r.log if "lr" in line] == list(range(1, run.steps + 1))
    for line in r.log:
        assert line["tokens"] == line["step"] * run.batch * run.seq_len
        if "val_loss" in line:
            assert_close(line["val_perplexity"], np.exp(line["val_loss"]), 1e-14, "perplexity")


def fp8_scales(r: Recording) -> None:
    """Each tensor's scale follows from the amaxes of the step before, and is in the last checkpoint: bit for bit."""
    assert r.steps[0].scales
    history = {(layer, tensor): oracle.Fp8History(tensor) for layer, tensor in r.steps[0].scales}
    saved = r.tensors(len(r.steps), "model")
    after = {key: saved[f"{key[0]}.fp8.scale"][list(oracle.FP8_MAX).index(key[1])] for key in history}
    for number, scales in enumerate([*(step.scales for step in r.steps), after]):
        expected = {key: kept.scale or np.float32(0) for key, kept in history.items()}
        assert scales == expected, f"before step {number}"
        for key, kept in history.items() if number < len(r.steps) else ():
            kept.advance(r.steps[number].amaxes.get(key, []))


def fp8_product(r: Recording) -> None:
    """The watched layer's output is that of FP8 values under the scales in force."""
    for step in r.steps:
        for x, w, y in step.products:
            values, factors = [], []
            for tensor, source in (("x", x), ("w", w)):
                history = oracle.Fp8History(
                    tensor, step.scales["model.layers.0.self_attn.q_proj", tensor] or None
                )
                scale = history.in_force(oracle.amax(source))
                values.append(oracle.fp8_values(source, scale, tensor).reshape(-1, source.shape[-1]))
                factors.append(1 / np.float64(scale))
            expected = values[0] @ values[1].T * factors[0] * factors[1]
            total = np.abs(values[0]) @ np.abs(values[1]).T * factors[0] * factors[1]
            # y is rounded to BF16 once; the float32 sum has 32 terms, and two factors follow.
            allowed = 2.0**-8 * np.abs(expected) + 2.0**-18 * total
            assert (np.abs(y.reshape(expected.shape) - expected) <= allowed).all()


OPTIMIZATION = {
    check.__name__: check
    for check in (
        initial_weights, data_order, training_loss, accumulation, gradient, clipping, schedule, adamw, evaluation_mode,
        validation, log,
    )
}  # fmt: skip
FP8 = {check.__name__: check for check in (standstill, adamw, fp8_scales, fp8_product, schedule)}
