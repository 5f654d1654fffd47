"""gfloat: FLOOR by floor(log2(amax)), in the type of its input."""

import numpy as np
from gfloat import compute_scale_amax, decode_block, encode_block, encode_float, round_float
from gfloat.formats import format_info_mxfp4_e2m1, format_info_ocp_e2m1, format_info_ocp_e8m0

from mxref import ScaleRule
from peers.peer import Decoder, Peer, Quantizer


def quantizer(dtype):
    def run(blocks):
        stored = []
        for block in blocks.astype(dtype):
            scale = compute_scale_amax(format_info_ocp_e2m1.emax, block)
            stored.append(list(encode_block(format_info_mxfp4_e2m1, scale, block / scale)))
        table = np.array(stored, np.uint8)
        return table[:, 0], table[:, 1:]

    return Quantizer(ScaleRule.FLOOR, run, refuses=(ValueError,))


def encoder(format):
    return lambda v: np.array(
        [encode_float(format, round_float(format, float(x), sat=True)) for x in v], np.uint8
    )


def decode(scales):
    return np.array([next(iter(decode_block(format_info_mxfp4_e2m1, [s, 7]))) for s in scales.tolist()])


PEER = Peer(
    "gfloat",
    quantizers={"gfloat float64": quantizer(np.float64), "gfloat float32": quantizer(np.float32)},
    elements={"gfloat": encoder(format_info_ocp_e2m1)},
    casts={"gfloat": encoder(format_info_ocp_e8m0)},
    decoders={"gfloat": Decoder("float64", decode)},
)
