"""`run.init_from`: the weights of a Hugging Face folder, exactly, or a refusal that names what differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exported import SCALED, TIED, exported, invoke, short, stored, trained, weights
from mxref.errors import MxrefError
from mxref.tomlio import dumps, shown, to_table
from mxref_training.config import ModelConfig
from mxref_training.config_files import load_config
from mxref_training.data import Loader
from mxref_training.errors import CheckpointError, ConfigError, DivergedError, HuggingFaceError, RunError
from mxref_training.huggingface.config_json import model_table, require_same_shape
from mxref_training.huggingface.weights import Weights
from mxref_training.model.llama import Llama
from mxref_training.model.pretrained import load_pretrained
from training_setup import CORPUS, change, metrics, run
from training_setup import weights as checkpoint

SHAPE = [
    "layers", "width", "heads", "kv_heads", "ffn", "vocab", "max_seq", "rope_theta", "rope_scaling", "norm_eps",
    "tie_embeddings",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained model in float32, in one file."""
    base = tmp_path_factory.mktemp("model")
    return exported(trained(base / "run", recipe="bf16"), base / "hf")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same, to be spoiled."""
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


def loaded(folder: Path, config: ModelConfig = SCALED) -> dict[str, torch.Tensor]:
    model = Llama(config, seed=9)
    load_pretrained(model, folder)
    return dict(model.named_parameters())


def rewrite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace a file; the tensors may be mapped from the old one."""
    path.unlink()
    save_file(tensors, path)


def test_weights_come_back_as_they_went_out(folder: Path, tmp_path: Path) -> None:
    wanted = stored(folder)
    found = loaded(folder)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    tied = trained(tmp_path / "tied", TIED, "bf16")
    out = exported(tied, tmp_path / "narrow", "--dtype", "bfloat16", "--max-shard-size", "10KB")
    assert len(list(out.glob("*.safetensors"))) > 2
    found = loaded(out, TIED)
    for name, tensor in weights(tied).items():
        assert found[name].dtype is torch.float32
        assert torch.equal(found[name], tensor.to(torch.bfloat16).float()), name


def test_weights_that_are_read_are_not_drawn_before(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of a folder nor those of a checkpoint; drawing takes long at full size."""
    plain = short(SCALED, steps=2, checkpoint_every=1)
    run(tmp_path / "plain", "bf16", plain, stop_after=1)

    def drawn(model: Llama, seed: int) -> None:
        raise AssertionError("weights were drawn")

    monkeypatch.setattr(Llama, "reset_parameters", drawn)
    with pytest.raises(RunError, match="weights were drawn"):
        run(tmp_path / "other", "bf16", plain)
    run(tmp_path / "plain", "bf16", plain)
    run(tmp_path / "begun", "bf16", short(SCALED, steps=1, init_from=str(folder)))


def test_a_run_begins_with_them_resumes_and_refuses_others(folder: Path, copy: Path, tmp_path: Path) -> None:
    config = short(SCALED, steps=4, checkpoint_every=2, init_from=str(folder))
    whole, parts, drawn = (tmp_path / name for name in ("whole", "parts", "drawn"))
    run(whole, "mxfp4", config)
    run(drawn, "mxfp4", short(SCALED, steps=4, checkpoint_every=2))
    assert metrics(whole) != metrics(drawn)
    run(parts, "mxfp4", config, stop_after=2)
    # The same weights in other files are the same run.
    shards = sorted(stored(copy).items())
    (copy / "model.safetensors").unlink()
    for i, part in enumerate((shards[:5], shards[5:])):
        save_file(dict(part), copy / f"{i}.safetensors")
    index = {name: f"{i}.safetensors" for i, part in enumerate((shards[:5], shards[5:])) for name, _ in part}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    run(parts, "mxfp4", change(config, init_from=str(copy)))
    assert metrics(parts) == metrics(whole)
    assert checkpoint(parts) == checkpoint(whole)
    other = load_file(copy / "0.safetensors")
    other["lm_head.weight"][0, 0] += 1
    rewrite(copy / "0.safetensors", other)
    with pytest.raises(
        CheckpointError, match=r"holds another run: run\.init_from is \w{64} there and \w{64} here"
    ):
        run(parts, "mxfp4", change(config, init_from=str(copy), steps=6))
    with pytest.raises(CheckpointError, match=r"run\.init_from is \w{64} there and not set here"):
        run(parts, "mxfp4", change(config, init_from=None, steps=6))


def test_the_first_step_is_taken_from_the_weights_of_the_folder(folder: Path, tmp_path: Path) -> None:
    config = short(SCALED, steps=1, init_from=str(folder))
    run(tmp_path / "run", "bf16", config)
    first = json.loads(metrics(tmp_path / "run").splitlines()[0])["loss"]
    model = Llama(SCALED, compute_dtype=torch.float32)
    inputs, targets = (
        torch.as_tensor(ids)
        for ids in Loader(CORPUS.train.ids, 32, config.run.order_seed, CORPUS.train.sha256).next_batch(2)
    )
    losses = []
    for state in (model.state_dict(), stored(folder)):
        model.load_state_dict(state)
        with torch.no_grad():
            logits = model(inputs).flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(logits, targets.flatten()).item())
    assert abs(losses[0] - losses[1]) > 0.5
    assert first == pytest.approx(losses[1], rel=0.02), "the run multiplies in bfloat16"


def test_a_folder_of_transformers_is_read(tmp_path: Path) -> None:
    """Written by Transformers itself: rotary parameters in its newer form, several files, bfloat16."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    found = loaded(tmp_path / "hf")
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in theirs.named_parameters())


def test_without_a_model_table_the_shape_is_that_of_the_folder(copy: Path, tmp_path: Path) -> None:
    table = to_table(short(SCALED, init_from=str(copy)))
    del table["model"]
    file = tmp_path / "mine.toml"
    file.write_text(dumps(table))
    with pytest.raises(HuggingFaceError, match=r"has no tokenizer\.json, .*set data.tokenizer"):
        load_config(file)
    (copy / "tokenizer.json").write_text("{}")
    config = load_config(file)
    assert {k: getattr(config.model, k) for k in SHAPE} == {k: getattr(SCALED, k) for k in SHAPE}
    assert config.data.tokenizer == str(copy / "tokenizer.json")
    shorter = load_config(file, ["model.max_seq=16", "run.seq_len=16", "data.tokenizer=other.json"])
    assert (shorter.model.max_seq, shorter.data.tokenizer) == (16, "other.json")
    with pytest.raises(HuggingFaceError, match=r"model\.max_seq = 64, but .* max_position_embeddings = 32"):
        load_config(file, ["model.max_seq=64"])
    with pytest.raises(ConfigError, match=r"run\.init_from is empty"):
        load_config("tiny", ["run.init_from="])


CHANGES = [
    ("layers", "num_hidden_layers", 3), ("width", "hidden_size", 128), ("heads", "num_attention_heads", 8),
    ("kv_heads", "num_key_value_heads", 4), ("ffn", "intermediate_size", 128), ("vocab", "vocab_size", 128),
    ("max_seq", "max_position_embeddings", 16), ("norm_eps", "rms_norm_eps", 1e-6),
    ("tie_embeddings", "tie_word_embeddings", True), ("rope_theta", "rope_theta", 5e5),
    ("rope_scaling", "rope_scaling", None),
]  # fmt: skip


@pytest.mark.parametrize(("mine", "theirs", "value"), CHANGES)
def test_each_field_of_the_shape_is_compared(mine: str, theirs: str, value: Any, copy: Path) -> None:
    table = json.loads((copy / "config.json").read_text())
    assert table[theirs] != value
    (copy / "config.json").write_text(json.dumps({**table, theirs: value, "head_dim": None}))
    with pytest.raises(HuggingFaceError) as caught:
        loaded(copy)
    own = shown(to_table(SCALED)[mine])
    said = "none" if value is None else shown(value)
    assert f"model.{mine} = {own}, but {copy / 'config.json'} has {theirs} = {said}: " in str(caught.value)


def test_every_key_of_the_model_is_compared_or_belongs_to_drawn_weights() -> None:
    assert {change[0] for change in CHANGES} == set(SHAPE)
    assert set(ModelConfig.__dataclass_fields__) - set(SHAPE) == {"init_std", "scale_output_init"}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model_type", "mistral", "model_type = 'mistral' is not 'llama'"),
        ("hidden_act", "gelu", "hidden_act = 'gelu', but only 'silu'"),
        ("attention_bias", True, "attention_bias = True, but only False"),
        ("mlp_bias", True, "mlp_bias = True, but only False"),
        ("head_dim", 32, "head_dim = 32, but only hidden_size / num_attention_heads = 64 / 4"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2}, "rope_type = 'yarn', but only 'default' and 'llama3'"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 2}, "low_freq_factor is missing in rope_scaling"),
        ("rope_scaling", 8, "rope_scaling = 8 is no table"),
        ("hidden_size", None, "hidden_size is missing"),
        ("num_hidden_layers", "two", "num_hidden_layers = 'two' is no positive integer"),
        ("quantization_config", {"quant_method": "quark"}, "quantized weights cannot be trained"),
    ],
)  # fmt: skip
def test_what_is_no_llama_3_is_refused(key: str, value: Any, said: str, copy: Path) -> None:
    table = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**table, key: value}))
    with pytest.raises(HuggingFaceError) as caught:
        model_table(copy)
    assert said in str(caught.value)
    assert str(copy / "config.json") in str(caught.value)


def test_missing_keys_have_the_defaults_of_transformers(copy: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    (copy / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    found, theirs = model_table(copy), LlamaConfig(**sizes)
    assert found["kv_heads"] == theirs.num_key_value_heads
    assert found["norm_eps"] == theirs.rms_norm_eps
    assert found["max_seq"] == theirs.max_position_embeddings
    assert found["tie_embeddings"] == theirs.tie_word_embeddings
    assert found["rope_theta"] == theirs.rope_parameters["rope_theta"]


Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks model.norm.weight; "),
        (lambda t: (t.pop("model.norm.weight"), t.pop("lm_head.weight")), "lacks lm_head.weight and 1 tensor more"),
        (lambda t: t.update({"a.bias": torch.ones(1)}), "holds more than the model: a.bias; "),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            "norm.weight has shape (63,), and the model has (64,)",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).byte()}), "is U8, but only F32, BF16, F16 "),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(spoil: Change, said: str, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    spoil(tensors)
    rewrite(copy / "model.safetensors", tensors)
    with pytest.raises(HuggingFaceError) as caught:
        loaded(copy)
    assert said in str(caught.value)


def test_rotary_frequencies_of_old_checkpoints_are_passed_over(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    rewrite(copy / "model.safetensors", tensors)
    assert torch.equal(loaded(copy)["model.norm.weight"], tensors["model.norm.weight"])


def test_a_second_copy_of_a_tied_weight_must_be_the_same(tmp_path: Path) -> None:
    out = exported(trained(tmp_path / "run", TIED, "bf16"), tmp_path / "hf")
    tensors = load_file(out / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(out / "model.safetensors", tensors)
    assert torch.equal(loaded(out, TIED)["model.embed_tokens.weight"], tensors["lm_head.weight"])
    tensors["lm_head.weight"][0, 0] += 1
    rewrite(out / "model.safetensors", tensors)
    with pytest.raises(HuggingFaceError, match="tie_word_embeddings = true, but lm_head.weight is not"):
        loaded(out, TIED)


def test_pickles_and_damaged_files_are_refused(copy: Path, tmp_path: Path) -> None:
    model, index = copy / "model.safetensors", copy / "model.safetensors.index.json"
    data = model.read_bytes()
    model.write_bytes(data[: len(data) // 2])
    with pytest.raises(HuggingFaceError, match=r"cannot read .*model\.safetensors: "):
        loaded(copy)
    model.unlink()
    (copy / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        HuggingFaceError, match=r"neither .* pickled .* are not read: save the model with save_pret"
    ):
        loaded(copy)
    for text, said in (
        ("{", "is damaged"),
        (json.dumps({"weight_map": {"a": "../secret.safetensors"}}), "which is not in its folder"),
        (json.dumps({"weight_map": {"a": "lost.safetensors"}}), "cannot read .*lost.safetensors"),
    ):
        index.write_text(text)
        with pytest.raises(HuggingFaceError, match=said):
            Weights.open(copy)
    model.write_bytes(data)
    index.write_text(json.dumps({"weight_map": {"a.weight": "model.safetensors"}}))
    with pytest.raises(
        HuggingFaceError, match=r"model\.safetensors lacks a\.weight, which model.* says it holds"
    ):
        Weights.open(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(HuggingFaceError, match=r"config\.json: it holds no table; give a folder"):
        require_same_shape(to_table(SCALED), copy)
    with pytest.raises(HuggingFaceError, match=r"config\.json: No such file or directory; give a folder"):
        loaded(tmp_path / "nowhere")


def test_a_preset_of_another_shape_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    result = invoke(
        "train",
        "tiny",
        "--set",
        f"run.init_from={folder}",
        "--set",
        "data.tokenizer=none.json",
        "--out",
        tmp_path / "run",
        "--dry-run",
    )
    assert result.exit_code == 2
    assert "model.width = 128, but " in result.stderr
    assert "leave the table [model] out of the configuration" in result.stderr
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_refused(copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = torch.inf
    rewrite(copy / "model.safetensors", tensors)
    with pytest.raises(MxrefError, match=r"lm_head\.weight"):
        run(tmp_path / "run", "bf16", short(SCALED, init_from=str(copy)))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
def test_weights_so_large_that_no_step_is_taken_end_as_diverged(
    copy: Path, tmp_path: Path, recipe: str
) -> None:
    """Every norm brings the activations back, so the losses stay finite, and the gradients do not."""
    tensors = {name: tensor * 1e30 for name, tensor in load_file(copy / "model.safetensors").items()}
    rewrite(copy / "model.safetensors", tensors)
    with pytest.raises(DivergedError, match="all 3 steps were skipped"):
        run(tmp_path / "run", recipe, short(SCALED, steps=3, init_from=str(copy)))
