"""The figure of the front: its numbers stand within their panels and beside the line of no difference."""

from __future__ import annotations

import pytest

from ablations import front, ladders
from bench.plot import NARROW, WIDE


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_numbers_stand_within_their_panels(width: float) -> None:
    found = {name: ladders.results_of(name) for name in front.SIZES}
    drawing = front.figure(found, width)
    drawing.draw_without_rendering()
    assert len(drawing.axes) == len(found)
    for axes, name in zip(drawing.axes, found, strict=True):
        panel = axes.get_window_extent()
        zero = axes.transData.transform((0, 0))[0]
        numbers = [
            text for text in axes.texts if text.get_text().startswith("+") or " +0." in text.get_text()
        ]
        assert len(numbers) == sum(name in line.sizes for line in front.lines(found))
        for text in numbers:
            place = text.get_window_extent()
            assert place.x1 <= (panel.x1 if width == WIDE else drawing.bbox.x1), text.get_text()
            assert place.x0 >= zero or width == NARROW, text.get_text()
        claims = [text.get_window_extent() for text in axes.texts if text.get_text().endswith(("%", "DNC"))]
        assert all(panel.x1 <= place.x0 and place.x1 <= drawing.bbox.x1 for place in claims)
    label = drawing.get_supxlabel()
    place = next(text for text in drawing.texts if text.get_text() == label).get_window_extent()
    assert drawing.bbox.x0 <= place.x0 < place.x1 <= drawing.bbox.x1
