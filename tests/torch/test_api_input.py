"""A converted layer takes its input by the name that nn.Linear gives it, under telemetry and searches too."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from api_setup import PLAIN, REFERENCE
from torch import nn

from mxref_torch import convert, find_nonfinite, telemetry
from mxref_torch.errors import LayerError


def made() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"layer": nn.Linear(32, 32)})
    return model, torch.randn(32, 32).requires_grad_()


def test_a_layer_takes_its_input_by_name() -> None:
    model, x = made()
    plain = model.layer(input=x)
    convert(model, PLAIN, backend=REFERENCE)
    y = model.layer(input=x)
    assert y.shape == plain.shape
    assert torch.equal(y, model.layer(x))


def test_telemetry_and_the_search_see_an_input_by_name() -> None:
    model, x = made()
    handle = convert(model, PLAIN, backend=REFERENCE)
    with telemetry(handle) as seen:
        model.layer(input=x).sum().backward()
    assert {row["operand"] for row in seen.rows} == {"x", "w", "dy", "dw"}
    with find_nonfinite(model) as search:
        model.layer(input=x * torch.inf)
    assert search.found == "X of layer"


def test_telemetry_refuses_a_model_without_converted_layers() -> None:
    model, x = made()
    with pytest.raises(LayerError, match="the model has none; call mxref_torch.convert"), telemetry(model):
        model.layer(x).sum().backward()
    # The search needs no conversion.
    with find_nonfinite(model) as search:
        model.layer(x / 0).sum().backward()
    assert search.found == "X of layer"
