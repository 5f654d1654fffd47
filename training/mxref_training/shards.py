"""Tensors in safetensors files: each rank writes the boxes that it holds, and boxes fill tensors of any placement.

A DTensor names its rank's box by the protocol of `torch.distributed.checkpoint` (DCP). Of ranks that hold the same box,
the one with the fewest bytes so far writes it. The header of a file says where a box lies in its whole tensor.

DCP's own parts do not fit: `FileSystemWriter` pickles its metadata; `HuggingFaceStorageWriter` builds each file in
memory and leaves out where a tensor ends, so that its reader takes a tensor for smaller if a file is missing; and its
planners take half a second to import, for which boxes that meet are the only arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mxref_training.distributed.ranks import Ranks

_BOXES = "chunks"
"""Key in a file's header: JSON with offset and whole shape of each tensor that is a box of a larger one."""


@dataclass(frozen=True)
class Box:
    """A box of a tensor."""

    tensor: Any
    """Its elements: a tensor, or a slice of an open file."""
    offset: tuple[int, ...]
    """Index of its first element in the whole tensor."""
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    """Shape of the whole tensor."""


def own_box(tensor: Tensor) -> Box:
    """Return the box of a tensor that this rank holds: all of it unless it is a DTensor."""
    whole = tuple(tensor.shape)
    if not hasattr(tensor, "__create_chunk_list__"):
        return Box(tensor.detach(), (0,) * tensor.ndim, whole, whole)
    (chunk,) = tensor.__create_chunk_list__()
    held = tensor.__get_tensor_shard__(None).detach()  # type: ignore[attr-defined]
    return Box(held, tuple(chunk.offsets), tuple(chunk.sizes), whole)


def boxes_to_write(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Box]:
    """Return the boxes that this rank writes, by name, so that all ranks together write everything once; collective.

    A name that only some ranks have is written by one of those.
    """
    own = {name: own_box(tensor) for name, tensor in tensors.items()}
    sizes = {
        (name, box.offset): box.tensor.nbytes
        for name, box in own.items()
        if math.prod(box.sizes) or not math.prod(box.whole)  # a rank may have no elements of a tensor
    }
    holders: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}  # each box: bytes by rank
    for rank, boxes in enumerate(ranks.gather(sizes)):
        for key, size in boxes.items():
            holders.setdefault(key, {})[rank] = size
    written, mine = [0] * ranks.world, {}
    for (name, _), held in sorted(holders.items()):
        writer = min(held, key=written.__getitem__)
        written[writer] += held[writer]
        if writer == ranks.rank:
            mine[name] = own[name]
    return mine


def write_boxes(path: Path, boxes: Mapping[str, Box]) -> None:
    """Write boxes into a safetensors file; OSError if it cannot be written."""
    cut = {
        name: {"offset": box.offset, "shape": box.whole}
        for name, box in sorted(boxes.items())
        if box.sizes != box.whole
    }
    # One key: safetensors writes several in an order that changes from call to call.
    header = {_BOXES: json.dumps(cut)} if cut else {"format": "pt"}
    try:
        save_file({name: box.tensor.contiguous() for name, box in boxes.items()}, path, metadata=header)
    except SafetensorError as err:
        raise OSError(str(err)) from err


@contextmanager
def opened(files: Sequence[Path]) -> Iterator[dict[str, list[Box]]]:
    """Open files for the block, and yield the boxes in them by name. The files are verified: all of one checkpoint."""
    held: dict[str, list[Box]] = {}
    with ExitStack() as stack:
        for path in files:
            file = stack.enter_context(safe_open(path, framework="pt"))
            cut = json.loads((file.metadata() or {}).get(_BOXES, "{}"))
            for name in sorted(file.keys()):
                tensor = file.get_slice(name)
                sizes = tuple(tensor.get_shape())
                place = cut.get(name, {"offset": [0] * len(sizes), "shape": sizes})
                box = Box(tensor, tuple(place["offset"]), sizes, tuple(place["shape"]))
                held.setdefault(name, []).append(box)
        yield held


def whole(boxes: Sequence[Box]) -> Tensor:
    """Return the tensor that boxes of a file make, on the CPU. What lies in one box is read when it is used."""
    first = boxes[0]
    if len(boxes) == 1:
        only: Tensor = first.tensor[(slice(None),) * len(first.whole)]
        return only
    made = torch.empty(first.whole, dtype=first.tensor[:0].dtype)
    fill(made, boxes)
    return made


@torch.no_grad()
def fill(tensor: Tensor, boxes: Sequence[Box]) -> None:
    """Fill a tensor of any placement in place from the boxes of its name, each rank its own box of a DTensor."""
    own = own_box(tensor)
    for box in boxes:
        firsts = [max(pair) for pair in zip(own.offset, box.offset, strict=True)]
        lasts = [
            min(a + n, b + m) for a, n, b, m in zip(own.offset, own.sizes, box.offset, box.sizes, strict=True)
        ]
        if all(first < last for first, last in zip(firsts, lasts, strict=True)):
            here, there = (
                tuple(slice(a - at, b - at) for a, b, at in zip(firsts, lasts, start, strict=True))
                for start in (own.offset, box.offset)
            )
            own.tensor[here].copy_(box.tensor[there])
