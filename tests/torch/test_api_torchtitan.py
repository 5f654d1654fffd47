"""Without torchtitan, the package for it says what to install; its own tests are in `tests/torchtitan`."""

from __future__ import annotations

import importlib
import sys

import pytest

pytest.importorskip("torch")

from torch import nn

import mxref_torch
from mxref_torch.errors import MissingPackageError


def test_a_missing_torchtitan_is_named_with_the_extra_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "mxref_torch.torchtitan" not in sys.modules
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(MissingPackageError, match=r"torchtitan 0\.3.*pip install 'mxref\[torchtitan\]'"):
        importlib.import_module("mxref_torch.torchtitan")
    assert not hasattr(mxref_torch, "torchtitan")


def test_layers_have_the_class_that_is_asked_for() -> None:
    class Layer(mxref_torch.MXLinear):
        pass

    model = nn.Sequential(nn.Linear(32, 32))
    mxref_torch.convert(model, "mxfp4_h16", backend="reference", layer_class=Layer)
    assert type(model[0]) is Layer
