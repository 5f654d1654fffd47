"""Operands of any PyTorch model as bytes: those of a plain model, of converted layers, torchao, compressed-tensors."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mxref
import mxref_torch
from conform_command import run
from mxref import DIALECTS, Recipe
from mxref.conformance.stacks import Stack, compare_stacks, load_stack
from mxref.errors import FileFormatError
from mxref.recipe import DgradSpec, FpropSpec, WgradSpec
from mxref_torch import LayerError, record_operands
from places import ROOT

INPUTS, HIDDEN, OUTPUTS = 128, 96, 64


class Model(nn.Module):
    """Two linear layers, the second called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(INPUTS, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(nn.functional.gelu(self.up(x)))
        return self.down(y)  # type: ignore[no-any-return]


def model() -> Model:
    return Model().to(torch.bfloat16)


def batch() -> torch.Tensor:
    return torch.randn(2, 24, INPUTS, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)


def recorded(module: nn.Module, file: Path, train: bool = False) -> Stack:
    with record_operands(module, file), torch.autocast("cpu", torch.bfloat16):
        y = module(batch())
        if train:
            y.float().square().sum().backward()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    return load_stack(file)


def converted(dialect: str, file: Path, train: bool = False) -> Stack:
    module = model().float()
    spec = DIALECTS[dialect].spec
    recipe = Recipe(FpropSpec(x=spec, w=spec), DgradSpec(dy=spec, w=spec), WgradSpec(dy=spec, x=spec))
    mxref_torch.convert(module, recipe, backend="reference")
    return recorded(module, file, train)


def assert_equal_bytes(ours: Stack, theirs: Stack) -> None:
    """Products may differ, as sums have any order; where the numbers before quantization are equal, the bytes are."""
    report = compare_stacks(ours, theirs)
    assert [pair.a.title for pair in report.pairs if not pair.ok and not pair.sources_differ] == []
    assert len(report.pairs) == 6
    assert sum(pair.ok for pair in report.pairs) >= 4, "the input, and the weights at each call"


def test_a_plain_model_records_the_numbers_that_it_multiplies(tmp_path: Path) -> None:
    module = model()
    held = recorded(module, tmp_path / "a.npz")
    assert [o.key for o in held.operands] == [
        (layer, "fprop", tensor, call) for layer, call in (("up", 0), ("down", 0), ("down", 1)) for tensor in "xw"
    ]  # fmt: skip
    first, weight = held.operands[0].source, held.operands[1].source
    assert first is not None
    assert weight is not None
    np.testing.assert_array_equal(first.astype(np.float32), batch().float().reshape(-1, INPUTS).numpy())
    np.testing.assert_array_equal(weight.astype(np.float32), module.up.weight.detach().float().numpy())
    assert held.name == "plain"


def test_converted_layers_record_the_bytes_of_all_three_gemms(tmp_path: Path) -> None:
    held = converted("amd", tmp_path / "a.npz", train=True)
    assert "without" not in held.facts
    assert {(o.gemm, o.tensor) for o in held.operands if o.layer == "down"} == {
        ("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("dgrad", "w"), ("wgrad", "dy"), ("wgrad", "x"),
    }  # fmt: skip
    for operand in held.operands:
        assert operand.array is not None
        assert operand.source is not None
        assert mxref.quantize(operand.source, "amd", axis=operand.array.axis, pad=True) == operand.array
        assert operand.treatment == "amd"


def test_a_linear_layer_that_calls_another_function_is_named(tmp_path: Path) -> None:
    class Other(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input @ self.weight.T

    module = model()
    module.down = Other(HIDDEN, HIDDEN).to(torch.bfloat16)
    held = recorded(module, tmp_path / "a.npz")
    assert [o.layer for o in held.operands] == ["up", "up"]
    assert held.facts["without"] == "down"
    assert "without down" in str(compare_stacks(held, held))


def test_layers_that_a_recipe_leaves_in_bf16_are_there_too(tmp_path: Path) -> None:
    module = model().float()
    mxref_torch.convert(module, "bf16", backend="reference")
    held = recorded(module, tmp_path / "a.npz")
    assert held.name.startswith("mxref ")
    report = compare_stacks(held, recorded(model(), tmp_path / "b.npz"))
    assert len(report.pairs) == 6
    assert all(pair.ok for pair in report.pairs if pair.a.tensor == "w" or pair.a.layer == "up")


@pytest.fixture
def torchao() -> Any:
    pytest.importorskip("torchao.prototype.mx_formats.inference_workflow")
    from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    def made(element: torch.dtype) -> nn.Module:
        module = model()
        emulated = KernelPreference.EMULATED
        quantize_(module, MXDynamicActivationMXWeightConfig(32, element, element, emulated))
        return module

    return made


@pytest.mark.parametrize(
    ("element", "dialect"), [("float4_e2m1fn_x2", "nvidia"), ("float8_e4m3fn", "te_mxfp8")]
)
def test_torchao_and_ours_give_equal_bytes(torchao: Any, element: str, dialect: str, tmp_path: Path) -> None:
    theirs = recorded(torchao(getattr(torch, element)), tmp_path / "ao.npz")
    assert theirs.name.startswith("torchao 0.")
    ours = converted(dialect, tmp_path / "ours.npz")
    assert_equal_bytes(ours, theirs)


def test_another_dialect_than_torchaos_is_told_apart(torchao: Any, tmp_path: Path) -> None:
    theirs = recorded(torchao(torch.float4_e2m1fn_x2), tmp_path / "ao.npz")
    text = str(compare_stacks(converted("amd", tmp_path / "ours.npz"), theirs))
    assert "first difference: layer up, fprop x\n  block" in text
    assert "  a: all bytes are those of the dialect amd; the stack names amd" in text
    assert "  b: all bytes are those of the dialect nvidia" in text


def test_nvfp4_tensors_of_torchao_are_read() -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    from mxref_torch.checks.operands import _torchao

    x = batch()[0]
    scale = nvfp4.per_tensor_amax_to_scale(x.abs().max())
    expected = mxref.quantize(x.float().numpy(), "torchao_nvfp4")
    for swizzled in (False, True):
        held = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, is_swizzled_scales=swizzled)
        assert _torchao(held) == expected


def compressed(preset: str) -> nn.Module:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    module = model()
    config = quantization.QuantizationConfig(
        config_groups={"all": preset_name_to_scheme(preset, ["Linear"])},
        quantization_status=quantization.QuantizationStatus.INITIALIZED,
    )
    quantization.apply_quantization_config(module, config)
    for each in (module.up, module.down):
        scheme = each.quantization_scheme
        scales, _ = compute_dynamic_scales_and_zp(each.weight.data, scheme.weights, each)
        each.weight_scale.data = scales.to(each.weight_scale.dtype)
    return module


def test_compressed_tensors_and_ours_give_equal_bytes(tmp_path: Path) -> None:
    theirs = recorded(compressed("MXFP4"), tmp_path / "ct.npz")
    assert theirs.name.startswith("compressed-tensors 0.")
    assert_equal_bytes(converted("amd", tmp_path / "ours.npz"), theirs)


def test_the_rule_of_compressed_tensors_in_mxfp8_is_named(tmp_path: Path) -> None:
    theirs = recorded(compressed("MXFP8"), tmp_path / "ct.npz")
    text = str(compare_stacks(converted("te_mxfp8", tmp_path / "ours.npz"), theirs))
    assert "  b: all bytes are those of scale_rule = >=1.75" in text


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    with (
        pytest.raises(LayerError, match="no linear layer ran: call the model within the block"),
        record_operands(model(), tmp_path / "a.npz"),
    ):
        pass
    with (
        pytest.raises(FileFormatError, match="must end in .npz"),
        record_operands(model(), tmp_path / "a.pt"),
    ):
        pass
    module = model()
    with (
        pytest.raises(LayerError, match="above 1,000 bytes"),
        record_operands(module, tmp_path / "a.npz", max_bytes=1000),
    ):
        module(batch())
    inside = model()
    inside.up.compile(backend="eager")
    for compiled, title in ((torch.compile(model(), backend="eager"), "the model"), (inside, "up")):
        with (
            pytest.raises(LayerError, match=f"{title} is compiled"),
            record_operands(compiled, tmp_path / "a.npz"),
        ):
            pass
    fp8 = model().float()
    mxref_torch.convert(fp8, "fp8", backend="reference")
    with (
        pytest.raises(LayerError, match="layer up reads FP8 with one scale"),
        record_operands(fp8, tmp_path / "a.npz"),
    ):
        fp8(batch())
    changed = compressed("MXFP4")
    changed.up.weight_scale.data *= 2
    with record_operands(changed, tmp_path / "b.npz"):
        changed(batch())
    assert [path.name for path in tmp_path.iterdir()] == ["b.npz"]


def test_the_program_of_the_page_shows_what_the_page_says(
    torchao: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "how-to" / "two-stacks.rst").read_text(encoding="utf-8")
    program, shown = re.findall(
        r"\.\. code-block:: (?:python\n   :caption: record.py|console)\n\n((?:   .*\n|\n)+)", page
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MXREF_BACKEND", "reference")
    exec(textwrap.dedent(program), {})
    found = run("compare", "ours.npz", "theirs.npz")
    assert found.exit_code == 1
    # Sums of other machines may give other numbers to the second layer.
    stable = [
        line.partition(" (")[0].strip()
        for line in shown.splitlines()
        if re.match(r"   (a:|b:|first|  (a|b|the|block))", line)
    ]
    assert len(stable) >= 6
    lines = [line.strip() for line in found.output.splitlines()]
    assert [line for line in stable if not any(each.startswith(line) for each in lines)] == []
