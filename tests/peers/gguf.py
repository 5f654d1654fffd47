"""gguf, the Python half of ggml: FLOOR by a float32 log2; a block is its byte and 16 bytes of two halves."""

import numpy as np
from gguf import GGMLQuantizationType, dequantize, quantize

from mxref import ScaleRule
from peers.peer import Decoder, Peer, Quantizer, beside_4

MXFP4 = GGMLQuantizationType.MXFP4


def run(blocks):
    # Its float arithmetic meets NaN, Inf and a negative exponent that it casts to uint8: that is what is shown.
    with np.errstate(all="ignore"):
        stored = quantize(blocks, MXFP4)
    return stored[:, 0], np.concatenate([stored[:, 1:] & 15, stored[:, 1:] >> 4], axis=-1)


def decode(scales):
    stored = np.full((len(scales), 17), 0x77, np.uint8)
    stored[:, 0] = scales
    with np.errstate(over="ignore"):
        return dequantize(stored, MXFP4)[:, 0]


PEER = Peer(
    "gguf",
    quantizers={"gguf": Quantizer(ScaleRule.FLOOR, run)},
    elements={"gguf": beside_4(run)},
    decoders={"gguf": Decoder("float32", decode)},
)
