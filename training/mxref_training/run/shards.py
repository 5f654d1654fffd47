"""The tensors of a checkpoint, split over ranks: which rank writes which part, and how parts fill tensors of any
placement.

`torch.distributed.checkpoint` (DCP) plans both. Ranks that hold the same part share the work: one of them writes it.
The parts lie in safetensors files, and the header of a file says where each part lies in its whole tensor. DCP's own
storage does not fit: `FileSystemWriter` pickles its metadata, and `HuggingFaceStorageWriter` builds each file in memory
and leaves out where a tensor ends, so that its reader takes a tensor for smaller if a file is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from mxref_training.distributed.ranks import Ranks
from mxref_training.run.checkpoint_files import CHUNKS, Part


class SavePlans:
    """Decides what each rank writes. The plan of the last save holds until a tensor changes its place on some rank."""

    def __init__(self) -> None:
        self._local: SavePlan | None = None
        self._own = SavePlan([])

    def parts(self, groups: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> dict[str, dict[str, Part]]:
        """Return what this rank writes of each group, so that all ranks together write everything once.

        Every rank calls this; a DTensor says by its placement which part each rank has. A name that only one rank has
        is written by that rank.

        Raises:
            ValueError: the parts of a tensor overlap or do not cover it.
        """
        tensors = {f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()}
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, is_coordinator=ranks.first)
        local = planner.create_local_plan()
        if ranks.any(local != self._local):
            plans, _ = planner.create_global_plan(ranks.gather(local))
            self._local, self._own = local, plans[ranks.rank]
        found: dict[str, dict[str, Part]] = {group: {} for group in groups}
        for item in self._own.items:
            assert item.tensor_data is not None
            chunk, whole = item.tensor_data.chunk, item.tensor_data.size
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            if tensor.numel() or not math.prod(whole):
                group, _, name = item.index.fqn.partition("/")
                found[group][name] = Part(tensor.detach(), tuple(chunk.offsets), tuple(whole))
        return found


@dataclass
class Parts:
    """The parts of tensors that lie in several files; a context manager, which keeps the files open."""

    files: Sequence[Path]
    _open: ExitStack = field(default_factory=ExitStack)
    _held: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict)
    _known: dict[str, TensorStorageMetadata] = field(default_factory=dict)

    def __enter__(self) -> Parts:
        """Read the headers.

        Raises:
            ValueError: the parts of a tensor do not fit together.
        """
        try:
            for path in self.files:
                self._take(path)
            for name, known in self._known.items():
                if sum(math.prod(chunk.sizes) for chunk in known.chunks) != math.prod(known.size):
                    raise ValueError(f"the parts of {name} do not make a tensor of shape {list(known.size)}")
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _take(self, path: Path) -> None:
        file = self._open.enter_context(safe_open(path, framework="pt"))
        cut = json.loads((file.metadata() or {}).get(CHUNKS, "{}"))
        for name in file.keys():  # noqa: SIM118 - no mapping
            held = file.get_slice(name)
            sizes = tuple(held.get_shape())
            place = cut.get(name, {"offset": [0] * len(sizes), "shape": sizes})
            offset, whole = tuple(place["offset"]), torch.Size(place["shape"])
            dtype = (held[:0] if sizes else file.get_tensor(name)).dtype
            known = self._known.setdefault(
                name, TensorStorageMetadata(TensorProperties(dtype=dtype), whole, [])
            )
            if known.size != whole or known.properties.dtype != dtype or (name, offset) in self._held:
                raise ValueError(f"{path.name} has a part of {name} that does not fit the others")
            known.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
            self._held[name, offset] = held

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors."""
        return frozenset(self._known)

    def whole(self) -> dict[str, Tensor]:
        """Return all tensors, each as a whole, on the CPU."""
        found = {
            name: torch.empty(known.size, dtype=known.properties.dtype)
            for name, known in sorted(self._known.items())
        }
        self.fill(found)
        return found

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors of any placement in place, each rank its own part of a DTensor; nothing is converted.

        Raises:
            LookupError: no tensor has such a name, or it has another shape or dtype.
        """
        for name, tensor in tensors.items():
            known = self._known.get(name)
            if known is None:
                raise LookupError(f"it has no {name}")
            if (known.size, known.properties.dtype) != (tensor.shape, tensor.dtype):
                theirs, ours = (
                    f"{known.properties.dtype} {list(known.size)}",
                    f"{tensor.dtype} {list(tensor.shape)}",
                )
                raise LookupError(f"its {name} is {theirs}, not {ours}")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), Metadata({name: self._known[name] for name in tensors}))
        with torch.no_grad():
            for item in planner.create_local_plan().items:
                where = item.storage_index
                assert where.offset is not None
                held = self._held[where.fqn, tuple(where.offset)]
                piece = tuple(
                    slice(first, first + length)
                    for first, length in zip(item.storage_offsets, item.lengths, strict=True)
                )
                planner.resolve_tensor(item).copy_(held[piece])
