"""`mxref identify`: formats, layouts and rules of small checkpoints, and what it says where it cannot know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import mxref
import quantized_files
from mxref.cli import main
from mxref.errors import FileFormatError, ShapeError
from mxref.identify.against import against
from mxref.identify.answer import identify, unexpected
from mxref.layouts.foreign import LAYOUTS
from mxref.layouts.packed import unpack
from mxref.steps.scale import scale_value

BLOCKS = 2048
LAYER = "model.layers.{}.mlp.up_proj"


def weights(seed: int = 0, shape: tuple[int, int] = (256, 512)) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.normal(0, 0.4, (shape[0], 1)))
    return (0.03 * rng.standard_normal(shape) * rows).astype(np.float32)


def compressed(q: mxref.MXArray, layer: str) -> dict[str, tuple[str, np.ndarray]]:
    """The tensors of a weight as compressed-tensors names them."""
    if q.format.element.bits == 8:
        return {f"{layer}.weight": ("F8_E4M3", q.codes), f"{layer}.weight_scale": ("U8", q.scales)}
    kind = "U8" if q.format.scale.powers else "F8_E4M3"
    found = {f"{layer}.weight_packed": ("U8", q.codes), f"{layer}.weight_scale": (kind, q.scales)}
    if q.tensor_scale is not None:
        found[f"{layer}.weight_global_scale"] = ("F32", 1 / q.tensor_scale)
    return found


def one(path: Path, blocks: int = BLOCKS):
    (group,) = identify((path,), blocks).groups
    return group


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        ("mxfp4", "floor"),
        ("mxfp4", "even"),
        ("mxfp4", "rceil"),
        ("mxfp4", "ceil"),
        ("mxfp6_e3m2", "rceil"),
        ("mxfp8_e4m3", "ceil"),
    ],
)
def test_a_rule_is_named(tmp_path, rule, made):
    mxref.quantize(weights(shape=(256, 1024)), mxref.OperandSpec(made, scale_rule=rule)).save(
        tmp_path / "w.npz"
    )
    group = one(tmp_path / "w.npz", 8192)
    assert [f.name for f in group.formats] == [made]
    assert group.verdict.rule == rule
    assert group.verdict.possible == (rule,)


def test_rules_of_mxint8_that_differ_too_little_are_not_told_apart(tmp_path):
    mxref.quantize(weights(), mxref.OperandSpec("mxint8", scale_rule="rceil")).save(tmp_path / "w.npz")
    found = one(tmp_path / "w.npz", 1024).verdict
    assert found.rule is None
    assert {"rceil", "even", "floor"} <= set(found.possible)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (np.random.default_rng(0).uniform(-1, 1, (256, 512)).astype(np.float32), "spread evenly"),
        (weights(shape=(8, 256)), "too few"),
        (np.zeros((256, 512), np.float32), "0 blocks"),
    ],
    ids=["uniform", "few", "zeros"],
)
def test_undecided_rather_than_wrong(tmp_path, x, reason):
    mxref.quantize(x, "amd").save(tmp_path / "w.npz")
    found = one(tmp_path / "w.npz").verdict
    assert found.rule is None
    assert reason in found.reason


def test_a_choice_by_the_smaller_error_has_no_name(tmp_path):
    x = weights(shape=(256, 1024))
    both = [mxref.quantize(x, mxref.OperandSpec(scale_rule=rule)) for rule in ("floor", "ceil")]
    errors = [((mxref.dequantize(q) - x) ** 2).reshape(256, -1, 32).sum(-1) for q in both]
    larger = errors[1] < errors[0]
    codes = np.where(np.repeat(larger, 16, axis=1), both[1].codes, both[0].codes)
    scales = np.where(larger, both[1].scales, both[0].scales)
    mxref.MXArray(codes, scales, x.shape, 1).save(tmp_path / "w.npz")
    assert one(tmp_path / "w.npz", 4096).verdict.rule is None


@pytest.mark.parametrize("four_over_six", ["off", "squared"])
def test_a_choice_by_error_among_scales_with_a_mantissa_is_named(tmp_path, four_over_six):
    q = mxref.quantize(weights(), mxref.OperandSpec("nvfp4", four_over_six=four_over_six))
    quantized_files.safetensors(tmp_path / "m.safetensors", compressed(q, LAYER.format(0)))
    group = one(tmp_path / "m.safetensors")
    assert group.verdict.rule == ("nearest" if four_over_six == "off" else "by_error")
    assert group.tensor_scale.inverse_by_name
    assert group.tensor_scale.inverse_by_size


def test_a_tensor_scale_of_the_wrong_direction_is_seen(tmp_path):
    q = mxref.quantize(weights(), mxref.OperandSpec("nvfp4"))
    tensors = compressed(q, LAYER.format(0)) | {
        f"{LAYER.format(0)}.weight_global_scale": ("F32", q.tensor_scale)
    }
    quantized_files.safetensors(tmp_path / "m.safetensors", tensors)
    fact = one(tmp_path / "m.safetensors").tensor_scale
    assert (fact.inverse_by_name, fact.inverse_by_size) == (True, False)
    shown = CliRunner().invoke(main, ["identify", str(tmp_path / "m.safetensors"), "--blocks", "512"]).output
    assert "one of both is wrong" in shown


# ---- conventions ----


def test_shards_of_a_folder_are_one_checkpoint(tmp_path):
    parts: list[dict] = [{}, {}]
    for number in range(2):
        for i, tensor in enumerate(
            compressed(mxref.quantize(weights(number), "amd"), LAYER.format(number)).items()
        ):
            parts[(i + number) % 2] |= [tensor]
    for i, part in enumerate(parts):
        quantized_files.safetensors(tmp_path / f"model-{i}.safetensors", part)
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    group = one(tmp_path, 8192)
    assert group.name == "model.layers.*.mlp.up_proj.weight"
    assert len(group.weights) == 2
    assert (group.convention, group.format_by) == ("compressed-tensors", "types, sizes and configuration")
    assert group.verdict.rule == "even"
    assert group.dialects == ("amd",)


@pytest.mark.parametrize("convention", ["quark", "gpt-oss", "torchao", "modelopt"])
def test_conventions_by_their_names(tmp_path, convention):
    q = mxref.quantize(weights(), "nvidia")
    blocks = q.codes.reshape(2, 128, 16, 16), q.scales.reshape(2, 128, 16)
    tensors, config = {
        "quark": ({"a.weight": q.codes, "a.weight_scale": q.scales}, {"quant_method": "quark"}),
        "modelopt": ({"a.weight": q.codes, "a.weight_scale": q.scales}, {"quant_algo": "W4A8_MXFP4_FP8"}),
        "gpt-oss": (dict(zip(("a_blocks", "a_scales"), blocks, strict=True)), {"quant_method": "mxfp4"}),
        "torchao": ({"a_qdata": q.codes, "a_scale": q.scales}, {}),
    }[convention]
    quantized_files.safetensors(tmp_path / "m.safetensors", {name: ("U8", a) for name, a in tensors.items()})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    group = one(tmp_path / "m.safetensors")
    assert group.convention == convention
    assert [f.name for f in group.formats] == ["mxfp4"]
    assert group.verdict.rule == "rceil"


@pytest.mark.parametrize("made", ["mxfp4", "nvfp4"])
def test_gguf(tmp_path, made):
    q = mxref.quantize(weights(), mxref.OperandSpec(made))
    raw = quantized_files.gguf_blocks(unpack(q.codes, q.format.element), q.scales, q.format.k)
    tensors = {
        "blk.0.ffn_up.weight": (made.upper(), (256, 512), raw),
        "norm": ("F32", (3,), np.ones(3, "f4").tobytes()),
    }
    path = quantized_files.gguf(tmp_path / "m.gguf", tensors)
    found = identify((path,), BLOCKS)
    (group,) = found.groups
    assert (group.packing, group.shape) == ("halves", (256, 512))
    assert group.verdict.rule == ("floor" if made == "mxfp4" else "nearest")
    reading = found.readings["blk.0.ffn_up.weight"]
    assert (reading.codes(np.arange(256)) == q.codes).all()
    assert (reading.scale_layouts["rows"] == q.scales).all()


def test_the_element_of_unnamed_bytes_is_read_from_codes(tmp_path):
    for name in ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8"):
        q = mxref.quantize(weights(), mxref.OperandSpec(name))
        path = tmp_path / f"{name}.safetensors"
        quantized_files.safetensors(path, {"a.weight": ("U8", q.codes), "a.weight_scale": ("U8", q.scales)})
        group = one(path, 512)
        assert [f.name for f in group.formats] == [name]
        assert group.format_by.startswith("codes")


@pytest.mark.parametrize("layout", ["rows", "rows.T", "nvidia_128x4", "gfx1250_32x4"])
def test_the_codes_tell_the_layout_of_scales(tmp_path, layout):
    q = mxref.quantize(weights(), "nvidia")
    stored = LAYOUTS[layout].write(q.scales, 256, 512, q.format).reshape(-1)
    tensors = {"a_packed": ("U8", q.codes), "a_scale": ("U8", stored)}
    quantized_files.safetensors(tmp_path / "m.safetensors", tensors)
    group = one(tmp_path / "m.safetensors")
    assert group.scale_layout == layout
    assert {"rows", "rows.T", "nvidia_128x4", "gfx950_32x8", "gfx1250_32x4"} <= set(
        group.scale_layouts_that_fit
    )
    assert group.verdict.rule == "rceil"


def test_equal_scales_tell_no_layout(tmp_path):
    x = np.random.default_rng(0).choice([-1, 1, 0.5, 0.25, 0.125], (128, 128)).astype(np.float32)
    x[:, ::32] = 1
    q = mxref.quantize(x)
    assert len(np.unique(q.scales)) == 1
    q.save(tmp_path / "w.npz")
    group = one(tmp_path / "w.npz")
    assert group.scale_layout is None
    assert "rows" in group.scale_layouts_that_fit


def test_tiles_are_seen(tmp_path):
    mxref.quantize(weights(), mxref.OperandSpec(block="32x32", scale_rule="rceil")).save(tmp_path / "w.npz")
    group = one(tmp_path / "w.npz")
    assert group.tile
    assert group.evidence.blocks == 8 * 16


# ---- evidence ----


def test_what_is_counted(tmp_path):
    x = weights()
    x[:8, :32] = 0
    x[8, :32] = -0.0
    x[9, 0] = np.nan
    mxref.quantize(x, mxref.OperandSpec(zero_scale=127)).save(tmp_path / "w.npz")
    e = one(tmp_path / "w.npz", 4096).evidence
    assert (e.blocks, e.zero_blocks, e.nan_blocks) == (4096, 10, 1)
    assert e.zero_block_bytes == {127: 9, 255: 1}
    assert e.scale_bytes == {0: 0, 254: 0, 255: 1}
    assert set(e.largest) == {4.0, 6.0}
    assert sum(e.largest.values()) == pytest.approx(1, abs=1e-5)
    assert 0.4 < e.minus_zeros < 0.6
    assert 0 < e.shared < 1


# ---- the original ----


def checkpoint(folder: Path, spec: str | mxref.OperandSpec, x: np.ndarray) -> Path:
    return quantized_files.safetensors(
        folder / "m.safetensors", compressed(mxref.quantize(x, spec), LAYER.format(0))
    )


def original(folder: Path, x: np.ndarray, name: str = f"{LAYER.format(0)}.weight") -> Path:
    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[x.dtype.name]
    return quantized_files.safetensors(folder / "original.safetensors", {name: (kind, x)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["amd", "nvidia", "torchao_nvfp4", "te_mxfp8"])
def test_the_dialect_that_gives_every_byte(tmp_path, name, dtype):
    x = weights().astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    found = identify((checkpoint(tmp_path, name, x),), 512)
    (origin,) = against(found, original(tmp_path, x))
    assert name in origin.dialects
    assert origin.difference is None
    assert not origin.transposed


def test_a_treatment_without_a_dialect(tmp_path):
    x = weights()
    spec = mxref.OperandSpec(scale_rule=">=1.875")
    (origin,) = against(identify((checkpoint(tmp_path, spec, x),), 512), original(tmp_path, x))
    assert (origin.dialects, origin.treatment) == ((), "scale_rule = >=1.875")


def test_blocks_along_the_first_axis(tmp_path):
    x = weights()
    found = identify((checkpoint(tmp_path, "amd", x),), 512)
    (origin,) = against(found, original(tmp_path, np.ascontiguousarray(x.T)))
    assert origin.dialects == ("amd",)
    assert origin.transposed


def test_the_first_differing_block_is_shown_with_its_link(tmp_path):
    x = weights()
    path = checkpoint(tmp_path, "amd", x)
    other = x.copy()
    other[3, 70] *= 4
    (origin,) = against(identify((path,), 512), original(tmp_path, other))
    d = origin.difference
    assert (d.dialect, d.differing, d.row, d.block) == ("amd", 1, 3, 2)
    assert d.stored[:2] == f"{mxref.quantize(x, 'amd').scales[3, 2]:02X}"
    assert d.link.endswith(",zero_scale=127") or "a=amd" in d.link
    shown = CliRunner().invoke(
        main, ["identify", str(path), "--against", str(tmp_path / "original.safetensors"), "--blocks", "512"]
    )
    assert d.link in shown.output


def test_another_original_is_refused(tmp_path):
    found = identify((checkpoint(tmp_path, "amd", weights()),), 512)
    with pytest.raises(ShapeError, match="256 rows of 512"):
        against(found, original(tmp_path, weights(shape=(64, 64))))
    two = {"b": ("F32", weights()), "c": ("F32", weights())}
    path = quantized_files.safetensors(tmp_path / "two.safetensors", two)
    with pytest.raises(FileFormatError, match=r"no floating-point tensor .*it has b, c"):
        against(found, path)


# ---- the command ----


def run(*words: object):
    return CliRunner().invoke(main, ["identify", *map(str, words)])


def test_expect_exits_with_1(tmp_path):
    path = checkpoint(tmp_path, "nvidia", weights())
    for rule, code in (("rceil", 0), ("nvidia", 0), ("even", 1), ("amd", 1)):
        done = run(path, "--expect", rule, "--blocks", 1024)
        assert done.exit_code == code, done.output
    assert "model.layers.*.mlp.up_proj.weight is rceil" in done.output
    assert run(path, "--expect", "evn").exit_code == 2


def test_json_has_what_the_text_has(tmp_path):
    path = checkpoint(tmp_path, "te_nvfp4", weights())
    table = json.loads(run(path, "--json", "--blocks", 512).output)
    assert table["format"] == "mxref.identify.1"
    (group,) = table["groups"]
    assert group["formats"] == ["nvfp4"]
    assert (group["rule"], group["confidence"]) == ("nearest", 0.99)
    assert "te_nvfp4" in group["dialects"]
    assert group["evidence"]["largest"] == {"6.0": 1.0}


def test_every_undecided_answer_names_its_reason(tmp_path):
    mxref.quantize(weights(shape=(4, 64))).save(tmp_path / "w.npz")
    shown = run(tmp_path / "w.npz").output
    assert "undecided: 8 blocks" in shown
    assert "possible: " in shown
    assert "99 %" not in shown


DAMAGED = {
    "cut.safetensors": b"\x10\0\0\0\0\0\0\0{",
    "huge.safetensors": b"\xff" * 8 + b"{}",
    "text.safetensors": (10).to_bytes(8, "little") + b"no json at",
    "list.safetensors": (2).to_bytes(8, "little") + b"[]",
    "magic.gguf": b"GGML" + bytes(20),
    "cut.gguf": b"GGUF" + (3).to_bytes(4, "little") + (9).to_bytes(8, "little") + bytes(8),
    "empty.npz": b"",
    "other.bin": b"x",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(DAMAGED[name])
    done = run(tmp_path / name)
    assert done.exit_code == 2
    assert name in done.output
    assert len(done.output.splitlines()) == 1
    with pytest.raises(FileFormatError):
        identify((tmp_path / name,))


def test_a_file_cut_within_its_tensors_is_refused(tmp_path):
    path = checkpoint(tmp_path, "amd", weights())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileFormatError, match="cut off"):
        identify((path,))


def test_what_is_no_quantized_checkpoint_is_said(tmp_path):
    with pytest.raises(FileFormatError, match="no weight in a block format among 1 tensors of the types F32"):
        identify((original(tmp_path, weights()),))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileFormatError, match="has no file that ends in"):
        identify((tmp_path / "empty",))
    done = run(tmp_path / "missing.safetensors")
    assert (done.exit_code, len(done.output.splitlines())) == (2, 1)
    path = checkpoint(tmp_path, "amd", weights())
    with pytest.raises(FileFormatError, match="both have a tensor"):
        identify((path, path))


def test_a_scale_per_channel_is_no_block_format(tmp_path):
    tensors = {
        "a.weight": ("F8_E4M3", np.zeros((64, 64), np.uint8)),
        "a.weight_scale": ("F32", np.ones((64, 1), "f4")),
    }
    with pytest.raises(FileFormatError, match="no weight in a block format"):
        identify((quantized_files.safetensors(tmp_path / "m.safetensors", tensors),))


def test_import_mxref_loads_none_of_it():
    code = "import sys, mxref; print(any(m.startswith('mxref.identify') for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_sample_of_a_long_weight_is_of_its_first_rows(tmp_path, monkeypatch):
    from mxref.identify import weights as room

    monkeypatch.setattr(room, "_MOST_BLOCKS", 4096)
    q = mxref.quantize(weights(shape=(1024, 512)), "amd")
    q.save(tmp_path / "w.npz")
    reading = identify((tmp_path / "w.npz",), BLOCKS).readings["codes"]
    assert (reading.rows, reading.read) == (1024, 256)
    for name, scales in reading.scale_layouts.items():
        whole = LAYOUTS[name].read(q.scales, 1024, 512, q.format)
        assert (scales == whole[:256]).all()
    assert (scale_value(reading.scale_layouts["rows"]) > 0).all()


def test_groups_that_are_small_are_judged_together(tmp_path):
    tensors = {}
    for i, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
        q = mxref.quantize(weights(i, (128, 256)), "nvidia")
        tensors |= compressed(q, f"model.layers.0.self_attn.{name}")
    found = identify((quantized_files.safetensors(tmp_path / "m.safetensors", tensors),), 255)
    assert len(found.groups) == 4
    assert {group.verdict.rule for group in found.groups} == {None}
    assert found.together["mxfp4"].rule == "rceil"
    assert unexpected(found, "nvidia") == []
    assert len(unexpected(found, "even")) == 4


def test_groups_of_different_rules_have_none_together(tmp_path):
    tensors = compressed(mxref.quantize(weights(0), "nvidia"), "a.up_proj")
    tensors |= compressed(mxref.quantize(weights(1), mxref.OperandSpec(scale_rule="ceil")), "a.down_proj")
    found = identify((quantized_files.safetensors(tmp_path / "m.safetensors", tensors),), BLOCKS)
    assert [group.verdict.rule for group in found.groups] == ["rceil", "ceil"]
    assert found.together["mxfp4"].rule is None
    assert len(unexpected(found, "rceil")) == 1


def test_a_prescale_hides_the_rule(tmp_path):
    mxref.quantize(weights(), mxref.OperandSpec(prescale=True)).save(tmp_path / "w.npz")
    found = one(tmp_path / "w.npz").verdict
    assert (found.rule, found.possible) == (None, ())
    assert "prescale" in found.reason


def test_even_of_pruned_weights_is_undecided(tmp_path):
    x = weights(shape=(256, 1024))
    x[np.random.default_rng(1).random(x.shape) < 0.5] = 0
    mxref.quantize(x, "amd").save(tmp_path / "w.npz")
    found = one(tmp_path / "w.npz", 8192).verdict
    assert (found.rule, found.possible[0]) == (None, "even")
