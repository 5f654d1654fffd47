"""`mxref export`: Transformers loads the same weights and tokenizer, and a failure leaves nothing behind."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import data_files
from exported import SCALED, TIED, exported, invoke, ours, refused, stored, trained, weights
from mxref_training.checkpoint import GROUPS, file_facts, file_name, write_manifest
from mxref_training.config import ModelConfig
from mxref_training.data import Tokenizer
from mxref_training.export import folder as export_folder
from mxref_training.shards import Box, write_boxes
from training_setup import CORPUS, VOCAB, files

pytest.importorskip("transformers")

own_cache = data_files.own_cache


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run") / "run")


def bf16_words(values: torch.Tensor) -> torch.Tensor:
    """The upper halves of float32, rounded to nearest with ties to even by integers."""
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@pytest.mark.parametrize("packed", [(), ("--packed", "compressed-tensors")], ids=["full", "packed"])
def test_all_files_have_the_mode_of_new_files(run: Path, tmp_path: Path, packed: tuple[str, ...]) -> None:
    """Safetensors makes files that nobody else may read; a server runs under another user."""
    (tmp_path / "new").touch()
    out = exported(run, tmp_path / "hf", *packed)
    assert {path.stat().st_mode for path in out.iterdir()} == {(tmp_path / "new").stat().st_mode}


def test_transformers_computes_the_same_logits(run: Path, tmp_path: Path) -> None:
    """The weights are equal. The logits are close: Transformers takes the angles of the rotary embedding in float32,
    mxref in float64, and the two add in another order.
    """
    from transformers import LlamaForCausalLM

    for model, source in ((SCALED, run), (TIED, trained(tmp_path / "tied", TIED, "bf16"))):
        out = exported(source, tmp_path / f"hf-{source.name}")
        theirs = LlamaForCausalLM.from_pretrained(out).eval()
        assert theirs.dtype is torch.float32
        own = weights(source)
        assert set(stored(out)) == set(own)
        for name, tensor in own.items():
            assert torch.equal(theirs.get_parameter(name), tensor), name
        assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == model.tie_embeddings
        ids = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits = theirs(ids).logits
            torch.testing.assert_close(logits, ours(source, model)(ids), rtol=2e-5, atol=2e-5)
        assert logits.std() > 0.3, "the comparison is not one of zeros"


def test_rotary_scaling_reaches_transformers(run: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(exported(run, tmp_path / "hf"))
    assert config.rope_parameters == {
        "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    }  # fmt: skip
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.rms_norm_eps, config.initializer_range) == (SCALED.norm_eps, SCALED.init_std)
    assert (config.max_position_embeddings, config.intermediate_size) == (32, 96)


def test_bfloat16_is_rounded_to_nearest_even_in_several_files(run: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    out = exported(run, tmp_path / "hf", "--dtype", "bfloat16", "--max-shard-size", "30KB")
    names = sorted(path.name for path in out.glob("*.safetensors"))
    count = len(names)
    assert count > 2
    assert names == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert all(path.stat().st_size < 34_000 for path in out.glob("*.safetensors"))
    found, own = stored(out), weights(run)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(own) == set(found)
    assert index["metadata"]["total_size"] == sum(2 * tensor.numel() for tensor in own.values())
    ties = 0
    for name, tensor in own.items():
        assert found[name].dtype is torch.bfloat16
        words = found[name].view(torch.int16).to(torch.int64) & 0xFFFF
        assert torch.equal(words, bf16_words(tensor)), name
        ties += int((words != (tensor.view(torch.int32).to(torch.int64) & 0xFFFFFFFF) >> 16).sum())
    assert ties > 1000, "rounding is not truncation here"
    theirs = LlamaForCausalLM.from_pretrained(out)
    assert theirs.dtype is torch.bfloat16
    assert torch.equal(theirs.lm_head.weight, found["lm_head.weight"])


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Tokenizer]:
    """A run with a tokenizer that was trained, and the cache that holds it."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        tokenizer = data_files.train_tokenizer(data_files.documents(data_files.make_texts(60)), 320)
    model = replace(TIED, vocab=384)
    corpus: Any = replace(CORPUS, tokenizer=tokenizer)
    run = trained(tmp_path_factory.mktemp("tokenized") / "run", model, "bf16", corpus=corpus)
    return run, cache, tokenizer


def test_the_tokenizer_of_the_run_is_loaded(
    with_tokenizer: tuple[Path, Path, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

    run, cache, tokenizer = with_tokenizer
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    result = invoke("export", run / "checkpoints" / "step-2", tmp_path / "hf")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path / 'hf'}: ")
    assert result.stdout.endswith(" parameters after 2 steps, float32, in 1 file of weights\n")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("the quick brown fox", "  two spaces,\n\nnaïve № 12345"):
        assert theirs.encode(text) == tokenizer.encode_batch([text])[0]
        assert theirs.decode(theirs.encode(text)) == text
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", tokenizer.eot)
    assert (theirs.pad_token, theirs.bos_token, theirs.model_max_length) == ("<|pad|>", None, 32)
    for config in (LlamaConfig, GenerationConfig):
        assert config.from_pretrained(tmp_path / "hf").eos_token_id == tokenizer.eot
    assert LlamaConfig.from_pretrained(tmp_path / "hf").bos_token_id is None


def test_another_or_a_lost_tokenizer_is_refused(
    with_tokenizer: tuple[Path, Path, Tokenizer], tmp_path: Path
) -> None:
    run, cache, tokenizer = with_tokenizer  # the cache of this test is empty
    text = refused(run, tmp_path / "hf")
    assert f"the run's tokenizer (SHA-256 {tokenizer.sha256[:16]}) is not in" in text
    assert "--tokenizer" in text
    assert "--no-tokenizer" in text
    (mine,) = cache.glob("mxref/tokenizers/*/tokenizer.json")
    other = tmp_path / "other.json"
    other.write_text(mine.read_text().replace('"[^', '"[^ ').replace("<|pad|>", "<|fill|>"))
    assert "other.json is not the tokenizer of the run: its SHA-256 is " in refused(
        run, tmp_path / "hf", "--tokenizer", other
    )
    assert not (tmp_path / "hf").exists()
    assert invoke("export", run, tmp_path / "hf", "--tokenizer", mine).exit_code == 0


def test_what_is_there_is_never_overwritten(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    assert refused(run, taken).endswith(
        f"{taken} exists and is not empty: choose another folder, or delete this one"
    )
    assert files(taken) == {"mine.txt": b"mine"}
    assert "exists and is no folder" in refused(run, taken / "mine.txt")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "exists and is no folder" in refused(run, tmp_path / "link")
    (tmp_path / "empty").mkdir()
    exported(run, tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    exported(run, Path("new/deeper"))
    assert (tmp_path / "new" / "deeper" / "config.json").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert ". is the current folder" in refused(run, ".", "--no-tokenizer")


@pytest.mark.parametrize("failing", ["save_file", "publish"])
def test_a_failure_leaves_nothing_behind(
    failing: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    where: Any = safetensors.torch if failing == "save_file" else export_folder
    real, when, calls = getattr(where, failing), 2 if failing == "save_file" else 1, []

    def full(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == when:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments, **options)

    before = files(run)
    monkeypatch.setattr(where, failing, full)
    out = tmp_path / "hf"
    text = refused(run, out, "--no-tokenizer", "--max-shard-size", "30KB")
    assert text.endswith(
        f"cannot write {out}: No space left on device; free some space, or choose another folder"
    )
    assert len(calls) == when
    assert list(tmp_path.iterdir()) == []
    assert files(run) == before
    monkeypatch.undo()
    exported(run, out)


def test_what_a_killed_process_left_is_cleared(run: Path, tmp_path: Path) -> None:
    other = tmp_path / ".other.tmp"
    other.mkdir()
    for name in ("hf", "[h]*"):  # no pattern of other names
        left = tmp_path / f".{name}.tmp"
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"half")
        out = exported(run, tmp_path / name)
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.tmp", "[h]*", "hf"]


def test_two_exports_to_one_folder_do_not_mix(run: Path, tmp_path: Path) -> None:
    from mxref_training.durable import locked

    with locked(tmp_path / ".hf.lock"):
        assert "is writing " in refused(run, tmp_path / "hf", "--no-tokenizer")
    exported(run, tmp_path / "hf")


def test_what_is_no_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    assert "is not a folder" in refused(tmp_path / "nothing", tmp_path / "hf")
    assert "has no run.json" in refused(tmp_path, tmp_path / "hf")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    model = copy / "checkpoints" / "step-2" / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    assert "damaged" in refused(copy, tmp_path / "hf", "--no-tokenizer")
    assert not (tmp_path / "hf").exists()


def test_a_checkpoint_of_two_ranks_is_exported_whole(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    step = copy / "checkpoints" / "step-2"
    for group in GROUPS:
        tensors = load_file(step / f"{group}.safetensors")
        (step / f"{group}.safetensors").unlink()
        for rank in range(2):
            boxes = {}
            for name, tensor in tensors.items():
                offset, shape = [0] * tensor.ndim, tuple(tensor.shape)
                if group == "model":  # each rank has half of the rows
                    half = tensor.chunk(2)[rank]
                    offset[0] = rank * half.shape[0]
                    boxes[name] = Box(half, tuple(offset), tuple(half.shape), shape)
                elif rank == 0:
                    boxes[name] = Box(tensor, tuple(offset), shape, shape)
            write_boxes(step / file_name(group, rank, 2), boxes)
    state = json.loads((step / "state.json").read_text())
    (step / "state.json").write_text(json.dumps({**state, "ranks": 2}))
    (step / "manifest.json").unlink()
    write_manifest(step, {path.name: file_facts(path) for path in step.iterdir()})
    found, whole = (stored(exported(source, tmp_path / f"{source.name}-hf")) for source in (copy, run))
    assert len(found) == len(whole) > 0
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_options_that_do_not_go_together_are_usage_errors(run: Path, tmp_path: Path) -> None:
    for options, said in (
        (("--recipe", "mxfp4"), "--recipe says how weights are packed: give --packed too"),
        (("--dialect", "ocp"), "--dialect says how weights are packed"),
        (("--packed", "quark", "--dtype", "float32"), "what is not packed is bfloat16"),
        (("--packed", "quark", "--recipe", "mxfp4", "--dialect", "ocp"), "give one of them"),
        (("--no-tokenizer", "--tokenizer", "a.json"), "give one of them"),
        (("--max-shard-size", "5 apples"), "'5 apples' is no size like 5GB or 500MiB"),
        (("--max-shard-size", "0"), "is no size"),
    ):
        result = invoke("export", run, tmp_path / "hf", *options)
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.split()), options


def test_a_value_that_bfloat16_cannot_hold_is_refused(tmp_path: Path) -> None:
    from mxref_training.errors import HuggingFaceError
    from mxref_training.export.model import _plain_part

    largest = torch.tensor([torch.finfo(torch.float32).max])
    with pytest.raises(
        HuggingFaceError, match=r"^w holds a value that is not finite in bfloat16: .*--dtype float32"
    ):
        _plain_part("w", largest, torch.bfloat16).make()
    assert torch.equal(_plain_part("w", largest, torch.float32).make()["w"], largest)


def test_a_model_of_another_width_fits_its_config() -> None:
    """head_dim is written, since some readers do not divide."""
    from mxref.tomlio import to_table
    from mxref_training.huggingface.config_json import config_json

    model = ModelConfig(layers=1, width=96, heads=3, kv_heads=1, ffn=32, vocab=64, max_seq=16)
    table = config_json(to_table(model), "bfloat16", 5)
    assert (table["head_dim"], table["eos_token_id"], table["rope_scaling"]) == (32, 5, None)
    assert table["torch_dtype"] == "bfloat16"
