"""Weights in safetensors files, one file or several with an index; read a tensor at a time, never unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mxref.tomlio import shown
from mxref_training.errors import HuggingFaceError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types that convert to float32 exactly, by their names in a file."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder, by name; nothing is read before it is asked for.

    A file is mapped into memory, so a process that takes a part of a tensor reads little more than that part.
    """

    folder: Path
    files: Mapping[str, str]
    """The file of each tensor."""

    @classmethod
    def open(cls, folder: Path) -> Weights:
        """Return the weights of a folder.

        Raises:
            HuggingFaceError: no safetensors files, or an index that is damaged or does not agree with them.
        """
        index = folder / INDEX
        if not index.is_file():
            single = folder / SINGLE
            if not single.is_file():
                raise HuggingFaceError(
                    f"{folder} has neither {SINGLE} nor {INDEX}; files that are pickled (.bin, .pt) are not read: save "
                    "the model with save_pretrained"
                )
            with _opened(single) as file:
                return cls(folder, dict.fromkeys(sorted(file.keys()), SINGLE))
        try:
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): str(file) for name, file in sorted(found.items())}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
            raise HuggingFaceError(f"{index} is damaged: {err!r}; copy the folder again") from err
        for name in sorted(set(files.values())):
            if Path(name).name != name:
                raise HuggingFaceError(f"{index} names the file {shown(name)}, which is not in its folder")
            mine = {tensor for tensor, file in files.items() if file == name}
            with _opened(folder / name) as file:
                if lost := sorted(mine - set(file.keys())):
                    raise HuggingFaceError(
                        f"{folder / name} lacks {lost[0]}, which {INDEX} says it holds; copy the folder again"
                    )
        return cls(folder, files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; HuggingFaceError unless its type is one of `DTYPES`."""
        with _opened(self.folder / self.files[name]) as file:
            part = file.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise HuggingFaceError(
                    f"{self.folder / self.files[name]}: {name} is {part.get_dtype()}, but only "
                    f"{', '.join(DTYPES)} can be trained: give the model in float32 or bfloat16"
                )
            return tuple(part.get_shape())

    def tensor(self, name: str) -> Any:
        """Return a tensor of PyTorch in the type of the file, on the CPU, its memory mapped from the file."""
        with _opened(self.folder / self.files[name]) as file:
            return file.get_tensor(name)

    def sha256(self) -> str:
        """Return one SHA-256 of names, types, shapes and bytes of all tensors, whatever files they are in."""
        facts = tuple(
            (file, stat.st_size, stat.st_mtime_ns)
            for file in sorted(set(self.files.values()))
            for stat in [(self.folder / file).stat()]
        )
        return _sha256(self.folder.resolve(), tuple(self.files.items()), facts)


@lru_cache(maxsize=8)
def _sha256(folder: Path, files: tuple[tuple[str, str], ...], facts: tuple[Any, ...]) -> str:
    """Hash the tensors; `facts` let a file that was replaced be read again."""
    import torch

    total = hashlib.sha256()
    weights = Weights(folder, dict(files))
    for name, _ in files:
        tensor = weights.tensor(name).contiguous()
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        total.update(head.encode())
        if tensor.numel():
            total.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Yield an open safetensors file; HuggingFaceError if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as err:
        raise HuggingFaceError(f"cannot read {path}: {err}; copy the folder again") from err
