"""Every peer on every input, as one JSON object."""

import itertools
import platform
import sys
from importlib.metadata import version
from typing import Any

import ml_dtypes
import numpy as np

from mxref import MXArray, OperandSpec, dequantize, quantize
from mxref.formats import E2M1
from mxref.layouts.packed import pack
from mxref.steps.scale import EXPONENT_RULES
from peers import cases
from peers.peer import Bytes, Peer, Quantizer, Values

NORMAL_BLOCKS = 65536
PEER_NORMAL_BLOCKS = 1024


def values_of(scales: Bytes, codes: Bytes) -> np.ndarray:
    """What blocks decode to, float64 [N, 32], by the reference."""
    return dequantize(MXArray(pack(codes, E2M1), scales[:, None], codes.shape, 1), "float64")


def release(distribution: str) -> str:
    """Return the installed version without its build, such as +cpu."""
    return version(distribution).partition("+")[0]


def peer_results(peer: Peer) -> dict[str, Any]:
    """Return what one peer gives for every input."""
    elements = np.array(list(cases.ELEMENTS.values()), np.float32)
    inputs = np.array(list(cases.CASTS.values()), np.float32)
    scales = np.array(cases.SCALE_BYTES, np.uint8)
    return {
        "version": release(peer.distribution),
        "blocks": {
            title: {
                "rule": quantizer.rule.value,
                "bfloat16": quantizer.bfloat16,
                "stored": _stored(quantizer),
                "normal": _normal(quantizer),
            }
            for title, quantizer in peer.quantizers.items()
        },
        "elements": {title: run(elements).tolist() for title, run in peer.elements.items()},
        "casts": {title: run(inputs).tolist() for title, run in peer.casts.items()},
        "decoders": {
            title: {"dtype": decoder.dtype, "values": [str(float(value)) for value in decoder.run(scales)]}
            for title, decoder in peer.decoders.items()
        },
    }


def _stored(quantizer: Quantizer) -> dict[str, str]:
    """Scale byte and codes in hexadecimal per block, or the name of the exception."""
    stored = {}
    for name, block in zip(cases.BLOCKS, cases.block_array(), strict=True):
        try:
            scales, codes = quantizer.run(block[None])
        except quantizer.refuses as error:
            stored[name] = type(error).__name__
        else:
            stored[name] = f"{scales[0]:02X} {''.join(f'{code:X}' for code in codes[0])}"
    return stored


def _normal(quantizer: Quantizer) -> int:
    """In how many blocks of N(0, 1) the peer has the byte and the values of the reference."""
    x = cases.normal_blocks(PEER_NORMAL_BLOCKS)
    return int(same_blocks(x, quantizer).sum())


def same_blocks(x: Values, quantizer: Quantizer) -> np.ndarray:
    """Whether byte and values of each block are the reference's, bool [N]."""
    scales, codes = quantizer.run(x)
    q = quantize(as_seen(x, quantizer.bfloat16), OperandSpec(scale_rule=quantizer.rule))
    same_values = (values_of(scales, codes) == dequantize(q, "float64")).all(axis=-1)
    return (scales == q.scales[:, 0]) & same_values


def as_seen(x: Values, bfloat16: bool) -> np.ndarray:
    """Return what a peer that takes bfloat16 is given."""
    return x.astype(ml_dtypes.bfloat16) if bfloat16 else x


def normal_results(count: int = NORMAL_BLOCKS) -> dict[str, Any]:
    """Return how often two scale rules of the reference differ on N(0, 1), per pair: bytes and element values."""
    x = cases.normal_blocks(count)
    stored = {rule.value: quantize(x, OperandSpec(scale_rule=rule)) for rule in EXPONENT_RULES}
    values = {rule: dequantize(q) for rule, q in stored.items()}
    pairs = list(itertools.combinations(stored, 2))
    return {
        "blocks": count,
        "bytes": {f"{a} {b}": float((stored[a].scales != stored[b].scales).mean()) for a, b in pairs},
        "values": {f"{a} {b}": float((values[a] != values[b]).mean()) for a, b in pairs},
    }


def environment() -> dict[str, str]:
    """Return what the results may depend on besides the peers' versions."""
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "numpy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
    }
