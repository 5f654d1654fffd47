"""Checkpoints that several ranks write together, each its own part, and that any number of ranks reads."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mxref_training import checkpoint
from mxref_training.checkpoint import GROUPS, CheckpointStore, Snapshot
from mxref_training.distributed.ranks import Ranks
from mxref_training.errors import CheckpointError
from rank_threads import cut, on_ranks

FACTS = {"loader": {"position": 7}, "rate": 0.1}


def wholes() -> dict[str, Tensor]:
    """Tensors whose rows divide evenly, unevenly, and into fewer parts than there are ranks."""
    draw = torch.Generator().manual_seed(0)
    return {
        "even": torch.randn(8, 6, generator=draw),
        "uneven": torch.randn(7, 3, generator=draw),
        "short": torch.randn(1, 4, generator=draw),
        "half": torch.randn(6, 2, generator=draw).to(torch.bfloat16),
    }


def snapshot(ranks: Ranks, step: int = 5, dimension: int = 0) -> Snapshot:
    """What a rank saves: parts of weights and moments, a number that all have, and its own generator."""
    parts = {name: cut(t, dimension, ranks.rank, ranks.world) for name, t in wholes().items()}
    model = {**parts, "fp8.scale": torch.tensor([1.0, 2.0, 3.0])}
    moments: dict[str, Tensor] = {f"exp_avg/{name}": t for name, t in parts.items()} | {
        "step/even": torch.tensor(5.0)
    }
    generators = {f"rank-{ranks.rank}/torch": torch.full((4,), ranks.rank, dtype=torch.uint8)}
    return Snapshot(step, {"model": model, "optimizer": moments, "rng": generators}, FACTS)


def saved(folder: Path, world: int, dimension: int = 0, steps: tuple[int, ...] = (5,)) -> CheckpointStore:
    """Write checkpoints on some ranks, and return how one process sees them."""
    for step in steps:
        assert_none_failed(
            on_ranks(
                world,
                lambda ranks, step=step: CheckpointStore(folder, 2, ranks).save(
                    snapshot(ranks, step, dimension)
                ),
            )
        )
    return CheckpointStore(folder, 2)


def assert_none_failed(found: list[Any]) -> None:
    assert not [x for x in found if isinstance(x, BaseException)], found


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype is wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_process_reads_the_whole_tensors(tmp_path: Path, world: int, dimension: int) -> None:
    store = saved(tmp_path, world, dimension)
    found = store.load(5)
    assert store.steps() == [5]
    for name, whole in wholes().items():
        assert same(found.tensors["model"][name], whole)
        assert same(found.tensors["optimizer"][f"exp_avg/{name}"], whole)
    assert same(found.tensors["model"]["fp8.scale"], torch.tensor([1.0, 2.0, 3.0]))
    assert same(found.tensors["optimizer"]["step/even"], torch.tensor(5.0))
    assert {name: int(t[0]) for name, t in found.tensors["rng"].items()} == {
        f"rank-{rank}/torch": rank for rank in range(world)
    }
    assert {key: found.state[key] for key in FACTS} == FACTS
    assert found.state["ranks"] == world


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 2), (4, 2)])
def test_ranks_read_their_parts_of_what_others_wrote(tmp_path: Path, before: int, after: int) -> None:
    """Written in rows and read in columns."""
    saved(tmp_path, before, dimension=0)

    def read(ranks: Ranks) -> dict[str, Tensor]:
        blank = {name: cut(torch.zeros_like(t), 1, ranks.rank, after) for name, t in wholes().items()}
        filled = {**blank, "fp8.scale": torch.zeros(3)}
        found = CheckpointStore(tmp_path, 2, ranks).load(5, ("model",), {"model": filled})
        assert all(found.tensors["model"][name] is t for name, t in filled.items())
        return {name: getattr(t, "box", t) for name, t in filled.items()}

    for rank, found in enumerate(on_ranks(after, read)):
        assert same(found["fp8.scale"], torch.tensor([1.0, 2.0, 3.0]))
        for name, whole in wholes().items():
            assert same(found[name], cut(whole, 1, rank, after).box), (rank, name)


def test_each_part_is_written_once(tmp_path: Path) -> None:
    path = saved(tmp_path, 2).path(5)
    assert sorted(p.name for p in path.iterdir()) == sorted(
        [f"{group}-{rank}-of-2.safetensors" for group in GROUPS for rank in (1, 2)]
        + ["manifest.json", "state.json"]
    )
    held: dict[str, int] = {}
    for file in path.glob("model-*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                held[name] = held.get(name, 0) + opened.get_tensor(name).numel()
    assert held == {name: t.numel() for name, t in wholes().items()} | {"fp8.scale": 3}


def test_the_same_parts_make_the_same_bytes(tmp_path: Path) -> None:
    parts = {name: checkpoint.Box(torch.arange(6.0), (6,), (6,), (12,)) for name in ("a", "b")}
    for number in range(24):
        checkpoint.write_boxes(tmp_path / str(number), parts)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_copy_that_several_ranks_have_is_written_once(tmp_path: Path) -> None:
    """Two pairs of ranks, each pair with all parts, as under hybrid sharding."""

    def save(ranks: Ranks) -> Path:
        model: dict[str, Tensor] = {name: cut(t, 0, ranks.rank % 2, 2) for name, t in wholes().items()}
        return CheckpointStore(tmp_path, 2, ranks).save(
            Snapshot(5, {"model": model, "optimizer": {}, "rng": {}}, FACTS)
        )

    assert_none_failed(on_ranks(4, save))
    found = CheckpointStore(tmp_path, 2).load(5, ("model",)).tensors["model"]
    assert all(same(found[name], whole) for name, whole in wholes().items())
    size = sum(p.stat().st_size for p in (tmp_path / "step-5").glob("model-*"))
    assert size < 2 * sum(t.nbytes for t in wholes().values()) + 4 * 600, "headers, and every byte once"


def test_damage_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    store = saved(tmp_path, 2, steps=(3, 5))
    path = store.path(5) / "model-2-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(
        CheckpointError, match=rf"step-5 is damaged: .*{path.name}.*to go on from step-3 delete"
    ) as alone:
        store.load(5)
    found = on_ranks(2, lambda ranks: CheckpointStore(tmp_path, 2, ranks).load(5, into={}))
    assert str(alone.value) in map(str, found)
    assert all(isinstance(err, Exception) for err in found)
    assert store.load(3).step == 3


@pytest.mark.parametrize(("rank", "name"), [(0, "optimizer"), (1, "model"), (1, "rng")])
def test_a_full_disk_of_one_rank_stops_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, name: str
) -> None:
    store = saved(tmp_path, 2, steps=(3,))
    write = checkpoint.write_boxes

    def full(path: Path, parts: Any) -> None:
        write(path, parts)
        if path.name == f"{name}-{rank + 1}-of-2.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_boxes", full)
        found = on_ranks(2, lambda ranks: CheckpointStore(tmp_path, 2, ranks).save(snapshot(ranks)))
    with pytest.raises(
        CheckpointError, match=r"cannot write the checkpoint .*step-5: No space left on device; .*step-3"
    ):
        raise found[rank]
    # The other waits in vain, or still writes to the folder that the first has removed.
    assert isinstance(found[1 - rank], BrokenBarrierError | CheckpointError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-3"]
    assert store.load(3).step == 3
    saved(tmp_path, 2)
    assert store.steps() == [3, 5]


@pytest.mark.parametrize("call", ["publish", "write_manifest", "replace_text", "remove"])
def test_what_only_the_first_rank_does_stops_all_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    saved(tmp_path, 2, steps=(1, 3))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    complete = call in ("replace_text", "remove")
    monkeypatch.setattr(checkpoint, call, full)
    found = on_ranks(2, lambda ranks: CheckpointStore(tmp_path, 2, ranks).save(snapshot(ranks)))
    with pytest.raises(CheckpointError, match="cannot .*No space left on device"):
        raise found[0]
    assert isinstance(found[1], BrokenBarrierError)
    assert CheckpointStore(tmp_path, 2).latest() == (5 if complete else 3)


def test_ranks_with_different_folders_write_no_checkpoint(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> Path:
        return CheckpointStore(tmp_path / str(ranks.rank), 2, ranks).save(snapshot(ranks))

    first, second = on_ranks(2, save)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint .*1/step-5"):
        raise second
    assert isinstance(first, BrokenBarrierError)
    assert CheckpointStore(tmp_path / "0", 2).steps() == []


@pytest.mark.parametrize("world", [1, 2])
def test_one_format_says_how_many_ranks_wrote(tmp_path: Path, world: int) -> None:
    state = saved(tmp_path, world).state(5)
    assert state == {"format": checkpoint.FORMAT, "step": 5, "ranks": world, **FACTS}


@pytest.mark.parametrize("name", ["../../run.json", "/etc/hostname", "model-3-of-2.safetensors", ""])
def test_a_manifest_that_does_not_list_the_files_is_refused(tmp_path: Path, name: str) -> None:
    """It names a file outside the folder, or one too many or too few."""
    store = saved(tmp_path, 2)
    path = store.path(5) / "manifest.json"
    manifest = json.loads(path.read_text())
    fact = manifest.pop("model-2-of-2.safetensors") if not name else manifest["model-2-of-2.safetensors"]
    path.write_text(json.dumps(manifest | ({name: fact} if name else {})))
    for read in (store.load, store.state):
        with pytest.raises(CheckpointError, match="manifest.json does not list the files of a checkpoint"):
            read(5)
