"""The shadow: a share of a run's operations against the reference, the fault that it finds, and the file of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mxref
import mxref_torch
from conform_command import run as command
from mxref.capabilities import every_gemm
from mxref.conformance import check
from mxref.conformance.replay import load_recording, replay
from mxref.discovery import get_backend
from mxref.errors import ConformanceError, FileFormatError, MxrefError
from mxref.placement import Placement
from mxref.recipe import GemmProfile
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend
from mxref_torch import operators
from mxref_torch.checks.watching import WHOLE_ELEMENTS, Shadow
from mxref_torch.errors import LayerError, ShadowError
from mxref_torch.operators import blocks

try:
    BACKENDS = [get_backend("numba").name]
except MxrefError:
    BACKENDS = []

TABLES: dict[str, dict[str, Any]] = {
    "rne": {"dialect": "amd"},
    "SR": {"dialect": "amd", "all": {"rounding": "sr"}},
    "H16, signs": {"all": {"hadamard": 16, "signs": "per_step_layer"}},
    "tiles, bounded": {
        "fprop": {"w": {"block": "32x32"}},
        "dgrad": {"w": {"block": "32x32"}},
        "gemm": "bounded",
    },
    "from Fprop": {"dgrad": {"source": "fprop"}, "wgrad": {"source": "fprop", "rounding": "sr"}},
    "mxfp8": {"all": {"format": "mxfp8_e4m3"}},
    "nvfp4": {"all": {"format": "nvfp4"}, "fprop": {"w": {"block": "16x16"}}, "wgrad": {"hadamard": 16}},
}


class FaultFrom(ReferenceBackend):
    """A reference that is right before a step and flips one bit from that step on."""

    name = "fault from"

    def __init__(self, step: int, gemm: bool = False) -> None:
        self.step, self.gemm, self.now = step, gemm, 0

    def _quantize(self, x: Any, plan: Any) -> Any:
        codes, scales = super()._quantize(x, plan)
        if self.now >= self.step and not self.gemm:
            codes = codes.copy()
            codes[-1, 3] ^= 1
        return codes, scales

    def _scaled_gemm(self, *arguments: Any) -> Any:
        out = super()._scaled_gemm(*arguments)
        if self.now >= self.step and self.gemm:
            out[1, 2] = np.nextafter(out[1, 2], np.float32(9e9))
        return out


def model_of(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 96, bias=False), nn.ReLU(), nn.Linear(96, 32, bias=False))


def train(
    model: nn.Module, context: Any, steps: int, each: Callable[[int], None] = lambda _: None
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        each(step)
        context.step = step
        loss = model(torch.randn(33, 64, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mxref_torch.advance(model)
        losses.append(loss.item())
    return losses


def converted(table: dict[str, Any], backend: Any) -> tuple[nn.Module, Any]:
    model = model_of()
    found = mxref_torch.convert(model, recipe_from_table(table), backend=backend, seed=7)
    return model, getattr(found, "context", found)


@pytest.mark.parametrize("name", TABLES)
def test_a_right_backend_shows_no_difference_and_no_bit_of_the_run_changes(tmp_path: Path, name: str) -> None:
    plain = train(*converted(TABLES[name], "reference"), 3)
    model, context = converted(TABLES[name], "reference")
    states = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # noqa: NPY002 - nobody may draw from it
    with mxref_torch.shadow(model, 1.0, file=tmp_path / "shadow.npz") as watch:
        losses = train(model, context, 3)
    assert losses == plain
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tobytes()  # noqa: NPY002
    # x and dy by row and by column, but dx of the first layer; each weight for the GEMMs that read it.
    again = 3 if "Fprop" in name else 0  # the weight for Fprop, of which Dgrad's is made
    assert watch.quantizations == 3 * (4 + 3 + 3) + again
    assert watch.products == (0 if "bounded" in name else 3 * 5)
    assert watch.elements > 3 * 33 * 64
    assert "no difference" in str(watch)
    assert operators.watchers == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gemm", [False, True])
def test_a_fault_that_begins_in_the_run_stops_it_and_is_replayed(tmp_path: Path, gemm: bool) -> None:
    backend = FaultFrom(3, gemm)
    table = TABLES["rne"] | {"gemm": "ordered"}
    assert check(backend, level="quick", clauses=["rounding.rne", "gemm.ordered"]).ok, "right at the start"
    model, context = converted(table, backend)
    file = tmp_path / "shadow.npz"
    clause = "gemm.ordered" if gemm else "rounding.rne"
    message = "step 3 counted from 0, layer 0, fprop.* differs from the reference under " + clause

    def each(step: int) -> None:
        backend.now = step

    with pytest.raises(ShadowError, match=message), mxref_torch.shadow(model, 1.0, file=file):
        train(model, context, 6, each)
    assert [p.name for p in tmp_path.iterdir()] == ["shadow.npz"], "whole, and no temporary file"
    (call,) = load_recording(file).calls
    assert call.where["layer"] == "0"
    still = replay(file, backend)
    assert not still
    assert still.calls[0].answered
    assert still.calls[0].answered.clause == clause
    differs = f"differs under {clause}"
    assert f"the recorded answer {differs}, {backend.name} {differs}" in str(still)
    with pytest.raises(ConformanceError, match=clause):
        still.require()
    fixed = replay(file, "reference")
    assert not fixed
    right = f"the recorded answer {differs}, reference is right"
    assert right in str(fixed)
    shown = command("conform", "--replay", str(file), "--backend", "reference")
    assert shown.exit_code == 1
    assert right in shown.output


def test_the_smallest_block_and_the_command_that_explains_it_are_shown(tmp_path: Path) -> None:
    backend = FaultFrom(0)
    model, context = converted(TABLES["rne"], backend)
    file = tmp_path / "shadow.npz"
    with pytest.raises(ShadowError, match="block 0 of row"), mxref_torch.shadow(model, 1.0, file=file):
        train(model, context, 1)
    failure = replay(file, backend).calls[0].answered
    assert failure is not None
    assert sum(int(word, 16) != 0 for word in failure.inputs["x"]) <= 1
    assert failure.command
    assert failure.command.startswith("mxref explain")


def test_the_draw_depends_on_the_number_of_the_operation_alone() -> None:
    model, _ = converted(TABLES["rne"], "reference")

    def drawn(share: float, seed: int = 0, large: bool = False) -> list[int]:
        watch = Shadow(model, share, seed, Path("shadow.npz"))
        found = []
        for number in range(20_000):
            if watch._drawn():
                found.append(number)
            if large:  # a large matrix has places drawn too
                watch._start((100, 70), (32, 32))
        return found

    few = drawn(0.01)
    assert few == drawn(0.01, large=True)
    assert few != drawn(0.01, seed=1)
    assert set(few) <= set(drawn(0.1))
    assert 150 < len(few) < 250
    assert len(drawn(1.0)) == 20_000
    assert drawn(0.0) == []


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", ["sr", "rne"])
def test_of_a_large_matrix_whole_blocks_are_compared_at_drawn_places(axis: int, spec: str) -> None:
    model, _ = converted(TABLES["rne"], "reference")
    watch = Shadow(model, 1.0, 0, Path("shadow.npz"))
    recipe = recipe_from_table({"all": {"rounding": spec, "hadamard": 64}})
    shape = (1111, 2112) if axis == 1 else (2112, 1111)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    text, words = operators.spec_text(recipe.wgrad.dy), operators.stream_words(3, 1, 4)
    region = operators.region_words(Placement(origin=(64, 192), global_shape=(4096, 8192)))
    key = operators.register_backend(ReferenceBackend())
    assert x.numel() > WHOLE_ELEMENTS
    operators.watchers.append(watch)
    try:
        sides = (text, "", words, None) if axis == 1 else ("", text, None, words)
        blocks.quantize(x, operators.batch_place(2), key, *sides, region, False)
    finally:
        operators.watchers.remove(watch)
    assert watch.quantizations == 1
    assert 6 * 32 * 64 < watch.elements <= 8 * 32 * 1024
    parts = watch._parts(shape, axis, 64)
    assert max(part[0].stop for part in parts) >= shape[0], "the end, where padding is"
    assert max(part[1].stop for part in parts) >= shape[1]


def test_drawn_places_reach_every_part_of_a_matrix_also_the_last_which_is_cut_short() -> None:
    model, _ = converted(TABLES["rne"], "reference")
    watch = Shadow(model, 1.0, 0, Path("shadow.npz"))
    shape, steps = (100, 70), (32, 32)
    found = set()
    for _ in range(200):
        found.add(watch._start(shape, steps))
    assert found == {(row, column) for row in range(0, 100, 32) for column in range(0, 70, 32)}


def test_random_bits_of_the_hardwares_own_are_left_out(tmp_path: Path) -> None:
    class Native(ReferenceBackend):
        name = "native"
        capabilities = replace(ReferenceBackend.capabilities, native_sr=True)

        def _quantize(self, x: Any, plan: Any) -> Any:
            stream = plan.stream and replace(plan.stream, seed=plan.stream.seed + 1)
            return super()._quantize(x, replace(plan, stream=stream))

    model, context = converted(TABLES["SR"], Native())
    with mxref_torch.shadow(model, 1.0, file=tmp_path / "shadow.npz") as watch:
        train(model, context, 1)
    assert watch.quantizations == 0
    assert watch.products


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, _ = converted(TABLES["rne"], "reference")
    for arguments, message in (
        ((model, 1.5), "share = 1.5 is outside"), ((model, -0.1), "outside 0"), ((model_of(),), "convert"),
        (("model",), "expected a model"),
    ):  # fmt: skip
        with pytest.raises(LayerError, match=message), mxref_torch.shadow(*arguments):
            pass
    for file in ("shadow.json", tmp_path / "no" / "shadow.npz"):
        with (
            pytest.raises(FileFormatError, match=r"must end in \.npz|folder"),
            mxref_torch.shadow(model, file=file),
        ):
            pass
    for name, content in (("no.npz", None), ("text.npz", b"abc"), ("zip.npz", b"PK\3\4")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(FileFormatError, match="cannot read a recording"):
            replay(tmp_path / name, "reference")
    assert command("conform", "--replay", str(tmp_path / "no.npz")).exit_code == 2
    other = command("conform", "--replay", str(tmp_path / "no.npz"), "--quick")
    assert other.exit_code == 2
    assert "--replay and --quick exclude each other" in other.output


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_is_looked_at_too(tmp_path: Path) -> None:
    backend = FaultFrom(1)
    model, context = converted(TABLES["SR"], backend)
    run = torch.compile(model, backend="eager")
    with mxref_torch.shadow(model, 1.0, file=tmp_path / "shadow.npz") as watch:
        run(torch.randn(32, 64)).square().mean().backward()
        assert watch.quantizations
        backend.now, context.step = 1, 1
        with pytest.raises(ShadowError, match="layer 0, fprop"):
            run(torch.randn(32, 64))


def test_a_recording_replays_with_every_backend_and_shows_a_wrong_product(tmp_path: Path) -> None:
    model, context = converted({"dialect": "amd", "gemm": "ordered", "all": {"hadamard": 16}}, "reference")
    file = tmp_path / "step.npz"
    context.step = 5
    with mxref_torch.record(model, file, ["2"]) as tape:
        model(torch.randn(64, 64)).square().mean().backward()
    assert {call.where["layer"] for call in tape.calls} == {"2"}
    products = [call for call in tape.calls if not hasattr(call, "codes")]
    assert sorted(call.where["role"] for call in products) == ["dgrad", "fprop", "wgrad"]
    for name in {"reference", *BACKENDS}:
        report = replay(file, name)
        assert report, str(report)
        assert len(report.calls) == len(tape.calls) == 9
    wrong = replay(file, FaultFrom(0, gemm=True))
    assert [call.answered.clause for call in wrong.calls if call.answered] == ["gemm.ordered"] * 3
    assert "the recorded answer is right, fault from differs under gemm.ordered" in str(wrong)


class OnlyMXFP8(ReferenceBackend):
    name = "only mxfp8"
    capabilities = replace(
        ReferenceBackend.capabilities,
        formats=frozenset({mxref.MXFP8_E4M3}),
        gemms=every_gemm(GemmProfile, [mxref.MXFP8_E4M3]),
    )


class NoGemm(ReferenceBackend):
    name = "no gemm"
    capabilities = replace(ReferenceBackend.capabilities, gemms=frozenset())


backend_without, backend_with_part = OnlyMXFP8(), NoGemm()


def test_a_replay_says_how_much_the_backend_declares_and_fails_if_that_is_nothing(tmp_path: Path) -> None:
    model, _ = converted({"dialect": "amd", "gemm": "ordered"}, "reference")
    file = tmp_path / "step.npz"
    with mxref_torch.record(model, file, ["2"]):
        model(torch.randn(32, 64)).square().mean().backward()
    nothing = replay(file, backend_without)
    assert not nothing
    assert str(nothing).splitlines()[-1] == (
        "9 operations, 0 with a difference; 9 not compared with only mxfp8, which does not declare them: "
        "replay with another backend"
    )
    part = replay(file, backend_with_part)
    assert part
    assert str(part).splitlines()[-1] == (
        "9 operations, 0 with a difference; 3 not compared with no gemm, which does not declare them"
    )
    for name, code in (("backend_without", 1), ("backend_with_part", 0)):
        found = command("conform", "--replay", str(file), "--backend", f"{__file__}:{name}")
        assert found.exit_code == code, found.output


def test_recordings_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    model, _ = converted(TABLES["rne"], "reference")
    x, file = torch.randn(32, 64), tmp_path / "step.npz"
    for arguments, error, message in (
        ((file, ["q_proj"]), LayerError, "'q_proj' matches no converted layer; there are 0, 2"),
        ((file,), LayerError, "none of the layers"),
        ((tmp_path / "step.bin",), FileFormatError, r"must end in \.npz"),
        ((tmp_path / "no" / "step.npz",), FileFormatError, "in a folder that exists and can be written"),
    ):
        with pytest.raises(error, match=message), mxref_torch.record(model, *arguments):
            pass
    with (
        pytest.raises(LayerError, match="above 1,000 bytes"),
        mxref_torch.record(model, file, max_bytes=1000),
    ):
        model(x)
    assert operators.watchers == []
    assert not list(tmp_path.iterdir())


def test_the_advice_names_a_backend_as_it_was_loaded(tmp_path: Path) -> None:
    """A file's backend is found by its path, not by the name of its class."""
    source = tmp_path / "my faults.py"
    source.write_text(
        "from mxref.reference import ReferenceBackend\n"
        "class Wrong(ReferenceBackend):\n"
        "    name = 'wrong'\n"
        "    def _quantize(self, x, plan):\n"
        "        codes, scales = super()._quantize(x, plan)\n"
        "        codes = codes.copy()\n"
        "        codes[-1, 3] ^= 1\n"
        "        return codes, scales\n"
        "backend = Wrong()\n"
    )
    file = tmp_path / "shadow.npz"
    loaded = get_backend(f"{source}:backend")
    for backend, named in (
        (loaded, f"--backend '{source}:backend' shows"),
        (type(loaded)(), "file.py:object"),
    ):
        model = model_of()
        mxref_torch.convert(model, recipe_from_table(TABLES["rne"]), backend=backend)
        with pytest.raises(ShadowError) as caught, mxref_torch.shadow(model, 1.0, file=file):
            model(torch.randn(32, 64)).sum().backward()
        assert named in str(caught.value)
    assert "differs" in command("conform", "--replay", str(file), "--backend", f"{source}:backend").output
