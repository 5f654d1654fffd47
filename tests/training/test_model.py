"""The Llama: its parts against hand-derived formulas, the whole against a second implementation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mxref.discovery import get_backend
from mxref.errors import MxrefError
from mxref.recipe_files import load_recipe
from mxref_torch import convert
from mxref_training.config import ModelConfig, OptimConfig, RopeScaling, Schedule
from mxref_training.config_files import PRESETS, RECIPES, load_config, names
from mxref_training.errors import ConfigError
from mxref_training.model.llama import Llama, flops_per_token, parameter_count, rope_frequencies
from mxref_training.optim import clip_gradients, learning_rate, make_optimizer, parameter_groups

SMALL = ModelConfig(
    layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=50, max_seq=24, rope_theta=10000.0, init_std=0.2
)


def small(config: ModelConfig = SMALL, seed: int = 0) -> Llama:
    return Llama(config, seed, compute_dtype=torch.float32)


def tokens(count: int = 20, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab, (2, count), generator=torch.Generator().manual_seed(seed))


def llama_numpy(model: Llama, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Logits [T, V] of one sequence in float64: explicit loops over heads and positions, from the paper's equations."""
    c = model.config
    w = {name: p.detach().double().numpy() for name, p in model.named_parameters()}

    def norm(x: NDArray[np.float64], gain: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * gain)

    def turn(v: NDArray[np.float64], position: int) -> NDArray[np.float64]:
        half = len(v) // 2
        out = np.empty_like(v)
        for i in range(half):
            angle = position * c.rope_theta ** (-2 * i / len(v))
            pair = complex(v[i], v[i + half]) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + half] = pair.real, pair.imag
        return out

    x = w["model.embed_tokens.weight"][ids]
    e, group = c.head_dim, c.heads // c.kv_heads
    for n in range(c.layers):
        p = f"model.layers.{n}."
        h = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (h @ w[p + f"self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = np.zeros_like(q)
        for head in range(c.heads):
            mine, theirs = slice(head * e, head * e + e), slice(head // group * e, head // group * e + e)
            for t in range(len(ids)):
                scores = np.array(
                    [turn(q[t, mine], t) @ turn(k[s, theirs], s) / math.sqrt(e) for s in range(t + 1)]
                )
                weights = np.exp(scores - scores.max())
                mixed[t, mine] = weights / weights.sum() @ v[: t + 1, theirs]
        x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (h @ w[p + "mlp.up_proj.weight"].T))
            @ w[p + "mlp.down_proj.weight"].T
        )
    return np.asarray(
        norm(x, w["model.norm.weight"]) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
    )


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_a_second_implementation(tied: bool) -> None:
    model = small(replace(SMALL, tie_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(3))
        ids = tokens()
        logits = model(ids)
    assert logits.dtype is torch.float32
    for row in range(2):
        expected = llama_numpy(model, ids[row].numpy())
        assert np.abs(expected).max() > 1  # the comparison below is not one of zeros
        np.testing.assert_allclose(logits[row].numpy(), expected, atol=2e-5)


def test_rope_scaling_of_llama3_by_hand() -> None:
    """Meta's rule, wavelength by wavelength: long ones / 8, short ones kept, between them mixed linearly in turns."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    plain = rope_frequencies(128, 500000.0, None).tolist()
    kinds = set()
    for frequency, scaled in zip(plain, rope_frequencies(128, 500000.0, scaling).tolist(), strict=True):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            kind, expected = "kept", frequency
        elif wavelength > 8192 / 1:
            kind, expected = "stretched", frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            kind, expected = "mixed", (1 - smooth) * frequency / 8 + smooth * frequency
        kinds.add(kind)
        assert scaled == pytest.approx(expected, rel=1e-12)
    assert kinds == {"kept", "mixed", "stretched"}
    assert plain[0] == 1.0
    assert plain[-1] == pytest.approx(500000.0 ** (-126 / 128))


def test_rotary_table_uses_the_scaling() -> None:
    config = replace(SMALL, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16))
    table = small(config).model.rotary_emb
    expected = rope_frequencies(SMALL.head_dim, SMALL.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(
        table.cos[5, : SMALL.head_dim // 2].numpy(), np.cos(5 * expected.numpy()), rtol=1e-6
    )
    assert not torch.equal(table.cos, small().model.rotary_emb.cos)


def test_rotation_depends_on_the_distance_alone() -> None:
    table = small().model.rotary_emb
    q, k = torch.randn(2, 1, 1, 1, SMALL.head_dim, generator=torch.Generator().manual_seed(0))
    turned_q, turned_k = (table(v.expand(1, 1, 20, -1))[0, 0] for v in (q, k))
    scores = turned_q @ turned_k.T  # [20, 20]
    for distance in (0, 3, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores[3, 0], scores[7, 0])


def test_grouped_heads_equal_full_heads_with_repeated_weights() -> None:
    grouped, full = small(), small(replace(SMALL, kv_heads=SMALL.heads))
    state = dict(grouped.state_dict())
    for name in [n for n in state if ".k_proj." in n or ".v_proj." in n]:
        heads = state[name].reshape(SMALL.kv_heads, SMALL.head_dim, SMALL.width)
        state[name] = heads.repeat_interleave(2, dim=0).reshape(SMALL.width, SMALL.width)
    full.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(grouped(tokens()), full(tokens()), atol=1e-5, rtol=1e-5)


def test_a_future_token_does_not_change_past_logits() -> None:
    model = small()
    before, changed = tokens(), tokens()
    changed[:, 12] = (changed[:, 12] + 1) % SMALL.vocab
    with torch.no_grad():
        a, b = model(before), model(changed)
    assert torch.equal(a[:, :12], b[:, :12])
    assert not torch.allclose(a[:, 12:], b[:, 12:])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_parameter_count(kv_heads: int, tied: bool) -> None:
    config = replace(SMALL, kv_heads=kv_heads, tie_embeddings=tied)
    assert parameter_count(config) == sum(p.numel() for p in small(config).parameters())


def test_full_size_preset_is_llama_31_8b() -> None:
    config = load_config("llama31_8b").model
    assert parameter_count(config) == 8_030_261_248
    model = Llama(config, device="meta")
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    # 6 per linear weight (the embedding is a look-up), and 6 * width per layer and attended position, T / 2 on average.
    linear = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert flops_per_token(config, 8192) == 6 * linear + 32 * 12 * 4096 * 8192 // 2


def test_weights_depend_on_the_seed_and_not_on_the_recipe() -> None:
    config = load_config("tiny").model
    weights: list[dict[str, torch.nn.Parameter]] = []
    for recipe in ("bf16", "fp8", "mxfp4", "tseng"):
        torch.manual_seed(len(weights))  # PyTorch's own generator has no say
        model = Llama(config, seed=5)
        convert(model, load_recipe(recipe), backend=get_backend("reference"), seed=5)
        weights.append(dict(model.named_parameters()))
    for other in weights[1:]:
        assert list(other) == list(weights[0])
        assert all(torch.equal(other[name], weights[0][name]) for name in other)
    another = dict(Llama(config, seed=6).named_parameters())
    assert not torch.equal(another["lm_head.weight"], weights[0]["lm_head.weight"])


def test_initial_weights_have_the_stated_spread() -> None:
    config = replace(load_config("tiny").model, init_std=0.02)
    model = Llama(config, seed=0)
    narrow = 0.02 / math.sqrt(2 * config.layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert bool((parameter == 1).all()), name
            continue
        output = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert parameter.std().item() == pytest.approx(narrow if output else 0.02, rel=0.05), name
        assert abs(parameter.mean().item()) < 0.002, name
    plain = Llama(replace(config, scale_output_init=False), seed=0)
    down = plain.get_parameter("model.layers.0.mlp.down_proj.weight")
    assert down.std().item() == pytest.approx(0.02, rel=0.05)


def test_loss_of_the_initial_model_is_that_of_guessing() -> None:
    config = load_config("tiny").model
    ids = torch.randint(0, config.vocab, (2, 65), generator=torch.Generator().manual_seed(0))
    model = Llama(config, compute_dtype=torch.float32)
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(config.vocab), abs=0.1)


def test_learning_rate_schedules() -> None:
    constant = OptimConfig(lr=1.0, warmup=4)
    assert [learning_rate(constant, step, 100) for step in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    cosine = replace(constant, schedule=Schedule.COSINE, min_lr_ratio=0.1)
    assert learning_rate(cosine, 4, 104) == 1.0
    assert learning_rate(cosine, 54, 104) == pytest.approx(0.55)  # half way: the mean of 1 and 0.1
    assert learning_rate(cosine, 29, 104) == pytest.approx(0.1 + 0.45 * (1 + math.sqrt(0.5)))
    assert learning_rate(cosine, 104, 104) == pytest.approx(0.1)
    fixed = replace(cosine, decay_steps=54)
    assert learning_rate(fixed, 29, 104) == pytest.approx(0.55)
    assert learning_rate(fixed, 90, 104) == pytest.approx(0.1)
    assert learning_rate(OptimConfig(lr=0.5), 0, 10) == 0.5
    linear = replace(constant, schedule=Schedule.LINEAR)
    assert [learning_rate(linear, step, 104) for step in (3, 4, 54, 103, 104)] == pytest.approx(
        [1.0, 1.0, 0.5, 0.01, 0.0]
    )
    wsd = replace(constant, schedule=Schedule.WSD, decay_start=84)
    assert [learning_rate(wsd, step, 104) for step in (0, 4, 84, 94, 103)] == pytest.approx(
        [0.25, 1.0, 1.0, 0.5, 0.05]
    )
    for wrong in (
        {"schedule": Schedule.WSD},
        {"decay_start": 50},
        {"schedule": Schedule.LINEAR, "decay_start": 50},
    ):
        with pytest.raises(ConfigError, match=r"optim\.decay_start"):
            replace(constant, **wrong)
    with pytest.raises(ConfigError, match=r"optim\.decay_start = 90 .* optim\.decay_steps = 80"):
        replace(constant, schedule=Schedule.WSD, decay_start=90, decay_steps=80)


def test_matrices_decay_and_norms_do_not() -> None:
    model = small()
    decayed, spared = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0.0
    named = {id(p): name for name, p in model.named_parameters()}
    assert {named[id(p)] for p in spared["params"]} == {n for n in named.values() if "norm" in n}
    assert "model.embed_tokens.weight" in {named[id(p)] for p in decayed["params"]}
    assert len(decayed["params"]) + len(spared["params"]) == len(named)


def test_one_adamw_step_by_hand() -> None:
    config = OptimConfig(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-5, weight_decay=0.5)
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    optimizer = make_optimizer(model, config)
    model.weight.grad = torch.tensor([[3.0]])
    optimizer.step()
    # The first step's bias corrections cancel the betas: the update is g / (|g| + eps), after decoupled decay.
    assert model.weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1 * 3 / (3 + 1e-5), rel=1e-6)


def test_clipping() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    for limit, expected in ((1.0, [0.6, 0.8]), (0.0, [3.0, 4.0]), (10.0, [3.0, 4.0])):
        model.weight.grad = torch.tensor([[3.0, 4.0]])
        assert float(clip_gradients(model.parameters(), limit)) == 5.0
        torch.testing.assert_close(model.weight.grad, torch.tensor([expected]), atol=1e-5, rtol=1e-5)
    model.weight.grad = torch.tensor([[math.inf, 4.0]])
    assert float(clip_gradients(model.parameters(), 1.0)) == math.inf
    assert model.weight.grad.tolist() == [[math.inf, 4.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.stesp=3", r"^--set 'run.stesp=3': unknown key 'stesp' in \[run\] \(did you mean 'steps'\?\)$"),
        ("run.lr=3", r"^--set 'run.lr=3': unknown key 'lr' in \[run\] \(did you mean 'optim.lr'\?\)$"),
        ("steps=3", r"^--set 'steps=3' is not of the form section.key=value \(did you mean 'run.steps'\?\)$"),
        ("run.steps=10\nrun.batch=3", r"run.steps: expected int, got '10\\nrun.batch=3' \(str\)$"),
        ("run.steps=many", r"^--set 'run.steps=many': run.steps: expected int, got 'many' \(str\)$"),
        (
            "optim.schedule=poly",
            r"^--set 'optim.schedule=poly': optim.schedule = 'poly' is not one of constant",
        ),
        ("model.rope_scaling.facto=2", r"in \[model.rope_scaling\] \(did you mean 'factor'\?\)$"),
        ("model.rope_scaling={facto=2}", r"in \[model.rope_scaling\] \(did you mean 'factor'\?\)$"),
        ("runs.steps=3", "unknown section 'runs' .did you mean 'run'"),
        ("run.steps", "is not of the form section.key=value"),
        ("run.steps=0", "run.steps = 0 is below 1"),
        ("run.micro_batch=3", "run.batch = 8 is not a multiple of run.micro_batch = 3"),
        ("run.seq_len=128", "run.seq_len = 128 is above model.max_seq = 64"),
        ("run.eval_tokens=8", "run.eval_tokens = 8 is below one sequence"),
        ("model.kv_heads=3", "model.heads = 4 is not a multiple of model.kv_heads = 3"),
        ("model.width=100", "model.width = 100 is not a multiple of 2 \\* model.heads"),
        ("model.rope_scaling.low_freq_factor=9.0", "must be positive and below high_freq_factor"),
        ("optim.lr=-1", "optim.lr = -1.0 is no positive number"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("tiny", [change])


def test_overrides_are_toml_or_strings() -> None:
    config = load_config(
        "tiny",
        [
            "optim.lr=1e-4",
            "data.train=a file.jsonl",
            "optim.schedule=cosine",
            "model.rope_scaling.factor=4.0",
        ],
    )
    assert config.optim.lr == 1e-4
    assert config.data.train == "a file.jsonl"
    assert config.optim.schedule is Schedule.COSINE
    assert config.model.rope_scaling == RopeScaling(factor=4.0)


def test_every_preset_and_recipe_loads() -> None:
    assert {"demo", "tiny", "llama31_8b"} <= set(names(PRESETS))
    for name in names(PRESETS):
        load_config(name)
    digests = [load_recipe(name).digest for name in names(RECIPES)]
    assert len(set(digests)) == len(digests) >= 6


@pytest.mark.parametrize("find", [load_config, load_recipe])
def test_unknown_names_are_refused(find: object) -> None:
    with pytest.raises(MxrefError, match="unknown .* 'tini'.*end in .toml"):
        find("tini")  # type: ignore[operator]
