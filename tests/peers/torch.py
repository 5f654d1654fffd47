"""torch: only float8_e8m0fnu, because torch has no cast to its packed float4_e2m1fn_x2."""

import torch

from peers.peer import Decoder, Peer


def cast(values):
    return torch.from_numpy(values).to(torch.float8_e8m0fnu).view(torch.uint8).numpy()


def decode(scales):
    return (6 * torch.from_numpy(scales).view(torch.float8_e8m0fnu).to(torch.float32)).numpy()


PEER = Peer("torch", casts={"torch": cast}, decoders={"torch": Decoder("float32", decode)})
