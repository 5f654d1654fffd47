"""compressed-tensors: the presets MXFP4A16 and MXFP8A16, scales from `calculate_qparams`, stored by its compressors."""

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

from mxref import ScaleRule
from mxref.formats import E2M1
from mxref.layouts.packed import unpack
from peers.peer import Decoder, Peer, Quantizer, beside_4

SCHEME = preset_name_to_scheme("MXFP4A16", ["Linear"])


def quantizer(dtype):
    def run(blocks):
        weight = torch.from_numpy(blocks).to(dtype)
        scale, _ = calculate_qparams(*torch.aminmax(weight, dim=-1), SCHEME.weights)
        state = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale[:, None]}, SCHEME)
        return state["weight_scale"].numpy()[:, 0], unpack(state["weight_packed"].numpy(), E2M1)

    return Quantizer(ScaleRule.EVEN, run, bfloat16=dtype is torch.bfloat16)


def mxfp8(blocks, dtype):
    """Scale bytes [N] and codes [N, 32] of E4M3 for float32 blocks [N, 32] as weights of a type."""
    scheme = preset_name_to_scheme("MXFP8A16", ["Linear"])
    weight = torch.from_numpy(blocks).to(dtype)
    scale, _ = calculate_qparams(*torch.aminmax(weight, dim=-1), scheme.weights)
    state = MXFP8QuantizationCompressor.compress({"weight": weight, "weight_scale": scale[:, None]}, scheme)
    return state["weight_scale"].numpy()[:, 0], state["weight"].view(torch.uint8).numpy()


def decode(scales):
    state = {
        "weight_packed": torch.full((len(scales), 16), 0x77, dtype=torch.uint8),
        "weight_scale": torch.from_numpy(scales[:, None]),
    }
    return MXFP4PackedCompressor.decompress(state, SCHEME)["weight"].to(torch.float64).numpy()[:, 0]


FLOAT32 = quantizer(torch.float32)

PEER = Peer(
    "compressed-tensors",
    quantizers={
        "compressed-tensors float32": FLOAT32,
        "compressed-tensors bfloat16": quantizer(torch.bfloat16),
    },
    elements={"compressed-tensors": beside_4(FLOAT32.run)},
    decoders={"compressed-tensors": Decoder("bfloat16", decode)},
)
