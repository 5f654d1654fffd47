"""transformers: how it unpacks the MXFP4 weights of gpt-oss."""

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from peers.peer import Decoder, Peer


def decode(scales):
    blocks = torch.full((1, len(scales), 1, 16), 0x77, dtype=torch.uint8)
    weight = convert_moe_packed_tensors(blocks, torch.from_numpy(scales[None, :, None]))
    return weight.to(torch.float64).numpy()[0, 0]  # [1, 32, N], transposed as the model wants it


PEER = Peer("transformers", decoders={"transformers": Decoder("bfloat16", decode)})
