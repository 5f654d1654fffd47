"""The projection of an MI355X: its formulas and its kernel times, on cases computed by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from mxref.errors import FileFormatError
from mxref_training.config_files import load_config
from mxref_training.model.llama import Llama, flops_per_token
from projection import roofline
from projection.assumptions import Assumptions, Machine
from projection.cases import (
    ALL_OF_IT,
    FULL,
    PARAMETERS,
    RECORDS,
    TINY,
    UNIT,
    WEIGHTS,
    arm,
    certain,
    peak,
    record,
)
from projection.step import ARMS, Part, Pass, Workload, by_part, step_times, total


def test_a_step_in_mxfp4_by_hand():
    times = step_times(TINY, arm("h16"), RECORDS, UNIT, FULL)
    tokens = 4 * 4 / 2  # 8 a card, in two micro-batches
    gemm = 2 * tokens * WEIGHTS
    head = 2 * tokens * 32 * 8
    attention = (
        2 * (4 / 2) * (4 * 4 / 2) * 2 * 2 * 8
    )  # 2 products over half the pairs of 2 sequences, 2 layers
    x, dy = 2 * (6 * 8 + 16), 2 * (8 + 4 + 4 + 8 + 16 + 16 + 8)
    expected = {
        (Pass.FORWARD, Part.FPROP): gemm,
        (Pass.BACKWARD, Part.DGRAD): gemm,
        (Pass.BACKWARD, Part.WGRAD): gemm,
        (Pass.FORWARD, Part.HEAD): head,
        (Pass.BACKWARD, Part.HEAD): 2 * head,
        (Pass.FORWARD, Part.ATTENTION): attention,
        (Pass.BACKWARD, Part.ATTENTION): 2.5 * attention,
        (Pass.FORWARD, Part.QUANTIZE_X): tokens * x * 10,
        (Pass.FORWARD, Part.QUANTIZE_W): WEIGHTS * (4 + 2 * 17 / 32),
        (Pass.BACKWARD, Part.QUANTIZE_DY): tokens * dy * 10,
        # norm 4 + 2, twice; residual 4 + 2 + 4, twice; rotary of q and k 2 + 2; SwiGLU 2 + 2 + 2
        (Pass.FORWARD, Part.LAYERS): tokens * 2 * (12 * 8 + 20 * 8 + 4 * 12 + 6 * 16),
        # norm: dy 2, x 4, dx onto the stream 4 + 4, twice; SwiGLU 6 in, 4 out; three sums of two BF16 gradients
        (Pass.BACKWARD, Part.LAYERS): tokens * 2 * (28 * 8 + 20 * 8 + 4 * 12 + 10 * 16 + 3 * 6 * 8),
        (Pass.FORWARD, Part.REST): tokens * (8 * (4 + 4) + 8 * (4 + 2) + 32 * 2),
        (Pass.BACKWARD, Part.REST): tokens * (2 * 8 * (4 + 4) + 2 * 8 * (4 + 2) + 32 * 4) + 12 * PARAMETERS,
        (Pass.UPDATE, Part.REST): 40 * PARAMETERS / 2,
        (Pass.FORWARD, Part.COMMUNICATION): 0.25 * PARAMETERS * 2 / 2,
        (Pass.BACKWARD, Part.COMMUNICATION): 0.25 * PARAMETERS * 4 / 2,
    }
    assert times == pytest.approx(expected)
    assert total(times) == pytest.approx(sum(expected.values()))
    assert sum(by_part(times).values()) == pytest.approx(total(times))


def test_only_products_and_operands_differ_between_arms():
    found = {a.key: step_times(TINY, a, RECORDS, UNIT, FULL) for a in ARMS}
    own = (Part.FPROP, Part.DGRAD, Part.WGRAD, Part.QUANTIZE_X, Part.QUANTIZE_W, Part.QUANTIZE_DY)
    rest = [{k: v for k, v in times.items() if k[1] not in own} for times in found.values()]
    assert all(r == rest[0] for r in rest)
    bf16, fp8 = found["bf16"], found["fp8"]
    assert bf16[Pass.FORWARD, Part.QUANTIZE_X] == bf16[Pass.BACKWARD, Part.QUANTIZE_DY] == 0
    assert bf16[Pass.FORWARD, Part.QUANTIZE_W] == WEIGHTS * 6
    assert fp8[Pass.FORWARD, Part.QUANTIZE_W] == WEIGHTS * 6
    assert fp8[Pass.FORWARD, Part.QUANTIZE_X] == 8 * 2 * (6 * 8 + 16) * 4


def test_each_format_has_the_peak_and_the_share_of_its_own():
    machine = replace(UNIT, bf16=peak(1.0), fp8=peak(2.0), fp6=peak(8.0), fp4=peak(4.0))
    assumed = replace(
        FULL, bf16_share=certain(0.5), fp8_share=certain(0.25), fp6_share=certain(0.0625), fp4_share=certain(0.125)
    )  # fmt: skip
    gemm = {a.key: step_times(TINY, a, RECORDS, machine, assumed)[Pass.FORWARD, Part.FPROP] for a in ARMS}
    flops = 2 * 8 * WEIGHTS
    assert gemm == dict.fromkeys(gemm, flops * 2)
    faster = replace(machine, fp6=peak(16.0))
    mixed = [step_times(TINY, arm("mx64"), RECORDS, m, assumed) for m in (machine, faster)]
    halves = [(mixed[1][place] / mixed[0][place]) for place in (
        (Pass.FORWARD, Part.FPROP), (Pass.BACKWARD, Part.DGRAD), (Pass.BACKWARD, Part.WGRAD)
    )]  # fmt: skip
    assert halves == [0.5, 1, 1]
    head = step_times(TINY, arm("h16"), RECORDS, machine, assumed)[Pass.FORWARD, Part.HEAD]
    assert head == 2 * 8 * 32 * 8 / 0.5


def test_layers_that_are_computed_again_take_their_forward_pass_twice():
    once = step_times(TINY, arm("h16"), RECORDS, UNIT, FULL)
    again = step_times(replace(TINY, recompute=True), arm("h16"), RECORDS, UNIT, FULL)
    more = {place: again[place] - once.get(place, 0.0) for place in again}
    repeated = (Part.FPROP, Part.QUANTIZE_X, Part.ATTENTION, Part.LAYERS, Part.COMMUNICATION)
    expected = dict.fromkeys(again, 0.0) | {(Pass.BACKWARD, p): once[Pass.FORWARD, p] for p in repeated}
    assert more == pytest.approx(expected)


def test_the_slower_of_links_and_network_carries_the_weights():
    large = replace(TINY, batch=64, cards=64)

    def gathered(links, network):
        machine = replace(UNIT, links=peak(links), network=peak(network))
        times = step_times(large, arm("h16"), RECORDS, machine, FULL)
        return times[Pass.FORWARD, Part.COMMUNICATION] / (0.25 * PARAMETERS * 2)

    assert gathered(1.0, 1.0) == pytest.approx(7 / 8)  # each card passes on what seven others received
    assert gathered(100.0, 0.1) == pytest.approx(
        56 / 64 / 8 / 0.1
    )  # seven other nodes' parts, by eight ports


def test_sizes_are_those_of_the_model():
    config = load_config("llama31_8b")
    work = Workload.of(config, 8)
    model = Llama(config.model, device="meta")
    linears = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    assert work.weights == sum(m.weight.numel() for m in linears)
    assert work.inputs(shared=False) == sum(m.in_features for m in linears)
    assert work.gradients == sum(m.out_features for m in linears)
    assert (work.tokens, work.micro_batches) == (32768, 2)


def test_products_are_the_operations_of_the_model():
    config = load_config("llama31_8b")
    work = Workload.of(config, 8)
    times = step_times(work, arm("bf16"), RECORDS, UNIT, ALL_OF_IT)
    flops = sum(
        seconds for (_, part), seconds in times.items()
        if part in (Part.FPROP, Part.DGRAD, Part.WGRAD, Part.HEAD)
    )  # fmt: skip
    # Backward attention computes one product more than is counted as useful.
    attention = times[Pass.FORWARD, Part.ATTENTION] * 3
    assert flops + attention == pytest.approx(work.tokens * flops_per_token(config.model, config.run.seq_len))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("row.rne.h16", 2 + 17 / 32),
        ("native.row.rne.h16", 2 + 17 / 32),
        ("column.rne.odd", 2 + 17 / 32),
        ("row.rne.float32", 4 + 17 / 32),
        ("row.rne.values", 2 + 2 + 1 / 32),
        ("dual.rne+sr16.h16", 2 + 34 / 32),
        ("train.x.h16.native", 2 + 34 / 32),
        ("train.w.h16", 4 + 34 / 32),
        ("hadamard.64", 6),
        ("dequantize.float32", 4 + 17 / 32),
        ("dequantize.bfloat16", 2 + 17 / 32),
        ("native.check.rne", 5),
        ("native.check.sr", 7),
    ],
)
def test_bytes_of_a_kernel(case, expected):
    assert roofline.bytes_per_element(case) == expected


def test_the_slower_limit_sets_the_time():
    few, many = (record("dual.rne+rne", alu) for alu in (64, 640))
    memory, vector = (roofline.kernel_time(r, 1.0, UNIT, ALL_OF_IT) for r in (few, many))
    assert (memory.bound, memory.seconds) == ("memory", 2 + 34 / 32)
    assert (vector.bound, vector.seconds) == ("vector", 10)
    with pytest.raises(FileFormatError, match=r"'transpose\.row': what it moves is not known"):
        roofline.bytes_per_element("transpose.row")


def test_a_gemm_loop_by_hand():
    scaled = record(
        "gemm.bounded",
        0,
        "_multiply",
        loop_matrix=32,
        loop_alu=16,
        notable=["v_mfma_scale_f32_16x16x128_f8f6f4"],
    )
    found = roofline.multiplication(scaled, Machine())
    # A matrix instruction takes 16 cycles of a SIMD and half a vector instruction 2; both work side by side.
    assert found.matrix == pytest.approx(2 * 2**40 / 10.066e15, rel=1e-3)
    assert found.vector / found.matrix == pytest.approx(2 / 16)
    assert found.bound == "matrix"
    with pytest.raises(FileFormatError, match="no matrix instruction whose rate is known"):
        roofline.multiplication(scaled | {"notable": ["v_mfma_f64_16x16x4_f64"]}, Machine())


def test_peaks_are_those_of_the_data_sheet():
    machine = Machine()
    assert [machine.matrix_flops(f) / 1e15 for f in ("fp4", "fp8", "bf16")] == pytest.approx(
        [10.07, 5.03, 2.52], abs=0.01
    )
    assert machine.lane_operations * 2 * 2 / 1e12 == pytest.approx(157.3, abs=0.1)  # packed float32 FMA


def test_every_assumption_has_a_source_and_its_slow_end_is_not_faster():
    for f in fields(Assumptions):
        a = getattr(Assumptions(), f.name)
        assert a.source
        # Bytes and slots are slow where they are many.
        ends = (
            (a.high, a.nominal, a.low)
            if f.name.endswith(("_bytes", "_slots"))
            else (a.low, a.nominal, a.high)
        )
        assert list(ends) == sorted(ends), f.name
    for f in fields(Machine):
        assert getattr(Machine(), f.name).source


def test_a_missing_count_is_refused():
    with pytest.raises(FileFormatError, match=r"0 kernels of case 'train\.x\.h16\.native'"):
        step_times(TINY, arm("h16"), RECORDS[1:2], UNIT, FULL)
