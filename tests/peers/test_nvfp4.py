"""NVFP4 of the installed implementations: each has the bytes of its dialect, and the record has the pinned releases."""

import numpy as np
import pytest

from bench.records import newest, read
from peers import nvfp4
from places import ROOT

RECORD = read(newest("nvfp4_peers"))


@pytest.mark.clause("scale.arithmetic", "dialect.torchao_nvfp4", "dialect.compressed_tensors_nvfp4")
@pytest.mark.parametrize("kind", nvfp4.KINDS.values())
@pytest.mark.parametrize("name", ["torchao", "compressed-tensors"])
def test_a_dialect_has_the_bytes_of_its_namesake(name, kind):
    pytest.importorskip(name.replace("-", "_"))
    x = nvfp4.numbers(kind, (60, 320))
    found = nvfp4.differing(x, nvfp4.INSTALLED[name](x), nvfp4.DIALECTS[name])
    assert found | {"codes": 0} == {"tensor": 0, "bytes": 0, "codes": 0, "values": 0}
    assert name != "torchao" or not found["codes"]


@pytest.mark.clause("scale.arithmetic", "dialect.compressed_tensors_nvfp4")
def test_compressed_tensors_rounds_the_inverse_of_a_tensor_twice():
    """A tensor whose 2688 / A rounds otherwise than 2688 times the rounded 1 / A; some bytes and codes show it."""
    pytest.importorskip("compressed_tensors")
    seen = 0
    for seed in range(40):
        x = np.random.default_rng(seed).standard_normal((16, 320)).astype(np.float32)
        amax = np.abs(x).max()
        twice = np.float32(1) / amax * np.float32(2688)
        seen += np.float32(2688) / amax != twice
        _, _, t = nvfp4.compressed_tensors(x)
        assert np.float32(t) == np.float32(1) / twice
    assert seen > 5


def test_the_record_is_of_pinned_releases_and_has_no_difference_from_the_dialects():
    pinned = (ROOT / "constraints.txt").read_text().split()
    for name in ("torchao", "compressed-tensors"):
        assert f"{name}=={RECORD['peers'][name]['version']}" in pinned
    assert {*RECORD["peers"]} == {*nvfp4.DIALECTS}
    assert RECORD["blocks"] == 100_000
    text = nvfp4.render(RECORD)
    assert "except" not in text
    RECORD["peers"]["ggml"]["differs"]["normal"]["dialect"]["values"] = 1
    assert "except: ggml, N(0, 1)" in nvfp4.render(RECORD)
