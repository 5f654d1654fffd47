"""Converted layers may have a class of their own, as those for torchtitan do; its tests are in `tests/torchtitan`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from torch import nn

import mxref_torch


def test_layers_have_the_class_that_is_asked_for() -> None:
    class Layer(mxref_torch.MXLinear):
        pass

    model = nn.Sequential(nn.Linear(32, 32))
    mxref_torch.convert(model, "mxfp4_h16", backend="reference", layer_class=Layer)
    assert type(model[0]) is Layer
