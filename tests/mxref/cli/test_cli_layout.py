"""`mxref layout`: the command that converts the files, and what it says of bytes that prove nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mxref
from conform_command import run
from mxref import MXArray, exchange


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MXArray:
    monkeypatch.chdir(tmp_path)
    q = mxref.quantize(np.random.default_rng(0).standard_normal((160, 320)).astype(np.float32))
    q.save("w.npz")
    return q


def said(*words: str, code: int = 0) -> str:
    done = run("layout", *words, width=200)
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_a_file_is_converted_and_back(written: MXArray) -> None:
    text = said("mxref", "high_first,nvidia_128x4", "w.npz", "kernel.safetensors")
    assert text == (
        "w.npz (mxref): MXFP4, shape [160, 320], blocks along axis 1, 1,600 blocks -> kernel.safetensors "
        "(high_first,nvidia_128x4): codes uint8 [160, 160], scales uint8 [256, 12]"
    )
    said("high_first,nvidia_128x4", "mxref", "kernel.safetensors", "back.npz")
    assert MXArray.load("back.npz") == written


def test_check_writes_nothing_and_says_what_the_bytes_do_not_prove(written: MXArray) -> None:
    before = sorted(Path().iterdir())
    assert "would be stored as (gpt-oss): weight_blocks uint8 [160, 10, 16]" in said(
        "mxref", "gpt-oss", "w.npz", "--check"
    )
    assert "40 rows" not in said("mxref", "weights_16x16", "w.npz", "--check")
    assert sorted(Path().iterdir()) == before
    once = exchange.stored(written, "nvidia_128x4")["scales"]
    np.savez("foreign.npz", codes=written.codes, scales=once)
    text = said("nvidia_128x4", "mxref", "foreign.npz", "--check")
    assert "1,472 bytes of scales are padding, all 0" in text
    assert "the file does not record its layout" not in text, "no other layout has this size"
    np.savez("foreign.npz", codes=written.codes, scales=once[::-1])
    text = said("nvidia_128x4", "mxref", "foreign.npz", "--check")
    assert (
        "of them are not 0 either the writer left padding as it was, or these scales are not in the layout"
        in text
    )
    np.savez("foreign.npz", codes=written.codes[:128], scales=written.scales[:128, :8])
    np.savez("small.npz", codes=written.codes[:128, :128], scales=written.scales[:128, :8])
    text = said("mxref", "mxref", "small.npz", "--check")
    assert "the file does not record its layout, and nvidia_128x4, gfx950_32x8, gfx1250_32x4" in text


def test_a_layer_of_a_checkpoint(written: MXArray) -> None:
    said("mxref", "gpt-oss", "w.npz", "model.safetensors", "--name", "mlp.experts.down_proj")
    text = said(
        "gpt-oss", "quark", "model.safetensors", "w.safetensors", "--key", "mlp.experts.down_proj", "--typed"
    )
    assert text.endswith("weight.weight uint8 [160, 160], weight.weight_scale uint8 [160, 10]")
    assert exchange.load("w.safetensors", "quark") == written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mxref", "rows", "w.npz"), "name RESULT, the file to write, or give --check"),
        (("mxref", "rows", "w.npz", "b.npz", "--check"), "name RESULT, the file to write, or give --check"),
        (("mxreff", "rows", "w.npz", "b.npz"), "unknown layout 'mxreff' (did you mean 'mxref'?)"),
        (("nvidia_128x4", "mxref", "w.npz", "b.npz"), "so that nothing is converted twice"),
        (("mxref", "rows", "w.npz", "b.npz", "--shape", "a,b"), "'a,b' is no list of numbers, as 128,4096"),
        (("mxref", "rows", "w.npz", "b.bin"), "the suffix must be .npz or .safetensors"),
        (("mxref", "rows", "w.npz", "b.npz", "--typed"), "only .safetensors files have them"),
        (("mxref", "rows", "no.npz", "b.npz"), "cannot read no.npz: No such file"),
    ],
)
def test_bad_usage_is_one_line(written: MXArray, words: tuple[str, ...], message: str) -> None:
    assert message in said(*words, code=2)
    assert not Path("b.npz").exists()
