"""Master weights that were cast after convert are refused, before they train without moving."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from api_setup import PLAIN, REFERENCE, Model, batch, loss_of

import mxref_torch
from mxref_torch import CapturedStep, convert
from mxref_torch.errors import LayerError

CAST = r"^blocks.0.up.weight is torch.bfloat16: master weights must be float32.*call model.float\(\) before convert"


def test_a_cast_before_follow_and_within_each_kind_of_step_is_refused() -> None:
    def started() -> tuple[Any, Any, Any]:
        model = Model()
        return (
            model,
            convert(model, PLAIN, backend=REFERENCE),
            torch.optim.AdamW(model.parameters(), fused=True),
        )

    def cast(model: Any) -> None:
        model.blocks.bfloat16()

    model, handle, optimizer = started()
    cast(model)
    with pytest.raises(LayerError, match=CAST):
        handle.follow(optimizer)

    model, handle, _ = started()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.follow(optimizer)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        if step:
            cast(model)
            with pytest.raises(LayerError, match=CAST):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()

    model, handle, optimizer = started()
    loss_of(model, batch(0)).backward()
    cast(model)
    with pytest.raises(LayerError, match=CAST):
        mxref_torch.advance(model)

    model, handle, optimizer = started()
    take = CapturedStep(model, handle, loss_of, optimizer, tokens=32, capture=False)
    take(batch(0))
    take.finish()
    cast(model)
    with pytest.raises(LayerError, match=CAST):
        take(batch(1))


def test_a_frozen_part_may_have_another_type() -> None:
    model = Model()
    model.embed.requires_grad_(False)
    handle = convert(model, PLAIN, backend=REFERENCE)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    model.embed.bfloat16()
    handle.follow(optimizer)
