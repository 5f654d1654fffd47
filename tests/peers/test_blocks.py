"""Other formats of the installed implementations: each has mxref's bytes, and the record has the pinned releases."""

import copy

import pytest

from bench.records import newest, read
from peers import blocks
from peers.render import StaleNoteError
from places import ROOT

RECORD = read(newest("block_peers"))
MODULES = {"compressed-tensors": "compressed_tensors", "nvidia-modelopt": "modelopt"}


@pytest.mark.study
@pytest.mark.clause("scale.rule.floor", "scale.rule.even", "scale.rule.threshold", "rounding.rne")
@pytest.mark.parametrize("case", [*blocks.cases()], ids=lambda case: case.name)
def test_an_installed_implementation_has_the_bytes_of_mxref(case):
    pytest.importorskip(MODULES.get(case.peer, case.peer))
    found = blocks.measured(case, rows=16)
    (recorded,) = (
        each
        for each in RECORD["cases"]
        if (each["peer"], each["format"], each["setting"]) == (case.peer, str(case.spec.format), case.setting)
    )
    for kind, numbers in found.items():
        for key, count in numbers.items():
            assert not count or recorded["differs"][kind][key]
    explained = blocks.note_of(recorded)
    assert bool(explained) == any(blocks.total({"differs": found}, key) for key in ("bytes", "values"))


def test_the_record_is_of_pinned_releases_and_of_every_case():
    pinned = (ROOT / "constraints.txt").read_text().split()
    for name in ("torchao", "gfloat", "compressed-tensors"):
        assert {f"{name}=={each['version']}" for each in RECORD["cases"] if each["peer"] == name} <= {*pinned}
    assert RECORD["blocks"] == 100_000
    recorded = {(each["peer"], each["format"], each["setting"]) for each in RECORD["cases"]}
    assert recorded == {
        (each.peer, str(each.spec.format), each.setting) for each in blocks.cases(mxc=True, te=True)
    }


def test_a_difference_without_a_note_and_a_note_without_a_difference_are_errors():
    changed = copy.deepcopy(RECORD)
    first = next(each for each in changed["cases"] if each["peer"] == "torchao")
    first["differs"]["normal"]["bytes"] = 1
    with pytest.raises(StaleNoteError, match="torchao, mxfp8_e4m3, FLOOR: no note"):
        blocks.render(changed)
    changed = copy.deepcopy(RECORD)
    changed["cases"] = [each for each in changed["cases"] if each["peer"] != "gfloat"]
    with pytest.raises(StaleNoteError, match=r"notes without a difference: \{1\}"):
        blocks.render(changed)
