"""torchao.prototype.mx_formats, eager and on the CPU: four scale rules."""

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

from mxref.formats import E2M1
from mxref.layouts.packed import unpack
from mxref.steps.scale import EXPONENT_RULES
from peers.peer import Decoder, Peer, Quantizer


def quantizer(rule):
    def run(blocks):
        mode = ScaleCalculationMode[rule.name]
        scales, packed = to_mx(torch.from_numpy(blocks), torch.float4_e2m1fn_x2, 32, mode)
        return scales.view(torch.uint8).numpy()[:, 0], unpack(packed.view(torch.uint8).numpy(), E2M1)

    return Quantizer(rule, run)


def decode(scales):
    packed = torch.full((len(scales), 16), 0x77, dtype=torch.uint8)
    e8m0 = torch.from_numpy(scales[:, None]).view(torch.float8_e8m0fnu)
    return to_dtype(packed, e8m0, torch.float4_e2m1fn_x2, 32, torch.float32).numpy()[:, 0]


PEER = Peer(
    "torchao",
    quantizers={f"torchao {rule.name}": quantizer(rule) for rule in EXPONENT_RULES},
    elements={"torchao": lambda v: f32_to_f4_unpacked(torch.from_numpy(v)).numpy()},
    decoders={"torchao": Decoder("float32", decode)},
)
