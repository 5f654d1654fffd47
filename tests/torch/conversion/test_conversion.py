"""Conversion of a model: what it refuses, and what it leaves as it was."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from layer_setup import Model, formats, recipe_of
from mxref import get_backend
from mxref.errors import MxrefError, UnsupportedError
from mxref.reference import ReferenceBackend
from mxref_torch import MXLinear, convert
from mxref_torch.errors import LayerError


@pytest.mark.parametrize(
    ("change", "table", "message"),
    [
        (lambda m: m.bfloat16(), {}, r"kept.weight is torch.bfloat16: master weights must be float32"),
        (lambda m: m.append_layer(48, 32), {}, r"extra: in_features = 48 is not a multiple of 32"),
        (
            lambda m: m.append_layer(32, 48),
            {},
            r"extra: out_features = 48 .* dgrad .* add 'extra' to keep_bf16",
        ),
        (
            lambda m: m.append_layer(32, 96),
            {"all": {"hadamard": 64}, "fprop": {"hadamard": 0}},
            r"extra: out_features = 96 is not a multiple of 64",
        ),
        (
            lambda m: m.append_layer(64, 48),
            {"dgrad": {"format": "bf16"}, "all": {"block": "32x32"}},
            r"out_features = 48 .* fprop .* block 32x32",
        ),
        (
            lambda m: m.append_layer(64, 48),
            {"dgrad": {"format": "bf16"}, "fprop": {"format": "bf16"}, "wgrad": {"block": "32x32"}},
            r"out_features = 48 .* wgrad .* block 32x32",
        ),
        (lambda m: None, {"keep_bf16": ["kept", "lm_heat"]}, r"'lm_heat' matches no linear layer"),
    ],
)
def test_convert_refuses_what_it_cannot_do(change, table, message):
    class Extended(Model):
        def append_layer(self, inputs, outputs):
            self.extra = nn.Linear(inputs, outputs)

    model = Extended()
    change(model)
    with pytest.raises(LayerError, match=message):
        convert(model, recipe_of(table), backend=get_backend("reference"), seed=0)
    assert not any(isinstance(m, MXLinear) for m in model.modules())


def test_convert_refuses_what_the_backend_does_not_declare():
    class Small(ReferenceBackend):
        name = "small"
        capabilities = type(ReferenceBackend.capabilities)(hadamard_sizes=frozenset({16}))

    with pytest.raises(UnsupportedError, match="hadamard_sizes"):
        convert(Model(), recipe_of({"all": {"hadamard": 32}}), backend=Small(), seed=0)
    with pytest.raises(UnsupportedError, match="gemms"):
        convert(Model(), recipe_of({"gemm": "bounded"}), backend=Small(), seed=0)
    with pytest.raises(LayerError, match=r"inside a module, .* nn.Sequential\(layer\)"):
        convert(nn.Linear(32, 32), recipe_of({}), backend=Small(), seed=0)
    with pytest.raises(MxrefError, match="seed"):
        convert(Model(), recipe_of({}), backend=get_backend("reference"), seed=-1)


def test_convert_keeps_parameters_and_can_be_repeated():
    model = Model(bias=True)
    shared = nn.ModuleDict({"a": model.layer, "b": nn.ModuleDict({"c": model.layer})})
    model.shared = shared
    model.twin = model.layer
    model.layer.eval()
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    convert(model, formats("fp8", "mxfp4", "bf16"), backend=get_backend("reference"), seed=0)
    convert(model, recipe_of({}), backend=get_backend("reference"), seed=0)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert model.layer is model.twin is model.shared["a"] is model.shared["b"]["c"]
    assert model.kept.training
    assert not model.layer.training
    assert model.layer.index == 1
