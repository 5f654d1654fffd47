"""The projection of an MI355X: its formulas on cases done by hand, and a page that equals what its counts give."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from click.testing import CliRunner

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bench.records import newest, read
from mxref.errors import FileFormatError
from mxref_training.config import ModelConfig, load_config
from mxref_training.model.llama import Llama, flops_per_token
from places import ROOT, TESTS
from projection import counted, measure, published, roofline
from projection.__main__ import main, projection_of, results
from projection.assumptions import Assumption, Assumptions, Level, Machine, Peak
from projection.compare import compare, sensitivities
from projection.page import PLOT, TABLES, parts, tables_text
from projection.step import ARMS, Part, Pass, Workload, by_part, step_times, total

DOCS = ROOT / "docs"
COUNTS = newest("projection")
DOCUMENT = read(COUNTS)
PROJECTION = projection_of(DOCUMENT)


def peak(value):
    return Peak(value, "", "", "")


def certain(value):
    return Assumption(value, value, value, "")


# One lane operation, one byte and one FP4 FLOP a second: seconds are amounts.
UNIT = Machine(**{f.name: peak(1.0) for f in fields(Machine)})
ALL_OF_IT = Assumptions(**{f.name: certain(1.0) for f in fields(Assumptions)})
FULL = replace(
    ALL_OF_IT, residual_bytes=certain(4), logit_bytes=certain(6), gradient_bytes=certain(4),
    parameter_bytes=certain(2), hidden_share=certain(0.75), shared_inputs=certain(0),
)  # fmt: skip
TINY = Workload(
    ModelConfig(layers=2, width=8, heads=2, kv_heads=1, ffn=16, vocab=32, max_seq=4),
    batch=4, seq_len=4, cards=2, micro_batch=1,
)  # fmt: skip
WEIGHTS = 2 * (2 * 8 * 8 + 2 * 4 * 8 + 3 * 8 * 16)  # q o, k v, gate up down
PARAMETERS = WEIGHTS + 2 * 32 * 8 + (2 * 2 + 1) * 8


def record(case, alu, kernel="quantize_both", **more):
    found = {
        "case": case, "target": "gfx950", "kernel": kernel, "elements_per_thread": 64.0, "alu": alu, "loop_alu": 0,
        "loop_matrix": 0, "occupancy": 4, "spills": 0, "vgpr": 64, "multiply32": 0, "notable": [],
    }  # fmt: skip
    return found | more


# 10 operations per element for X and dY, and 1 for W, whose 5.0625 bytes then bind.
RECORDS = [
    record(counted.case_name(tensor, rotation, native), 640 if tensor == "x" else 64)
    for tensor in counted.TENSORS
    for rotation in counted.ROTATIONS
    for native in (True, False)
]


def arm(key):
    return next(a for a in ARMS if a.key == key)


# ---- formulas ----


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
    machine = replace(UNIT, bf16=peak(1.0), fp8=peak(2.0), fp4=peak(4.0))
    assumed = replace(FULL, bf16_share=certain(0.5), fp8_share=certain(0.25), fp4_share=certain(0.125))
    gemm = {a.key: step_times(TINY, a, RECORDS, machine, assumed)[Pass.FORWARD, Part.FPROP] for a in ARMS}
    flops = 2 * 8 * WEIGHTS
    assert gemm == dict.fromkeys(gemm, flops * 2)
    head = step_times(TINY, arm("h16"), RECORDS, machine, assumed)[Pass.FORWARD, Part.HEAD]
    assert head == 2 * 8 * 32 * 8 / 0.5


def test_shared_inputs_are_quantized_once():
    shared = replace(FULL, shared_inputs=certain(1))
    (a, b) = (step_times(TINY, arm("fp8"), RECORDS, UNIT, s) for s in (FULL, shared))
    x = Pass.FORWARD, Part.QUANTIZE_X
    assert a[x] - b[x] == 8 * 2 * 3 * 8 * 4  # of q, k, v and of gate, up: three inputs of width 8 fewer
    layers = Pass.BACKWARD, Part.LAYERS
    assert a[layers] - b[layers] == 8 * 2 * 3 * 6 * 8


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


# ---- kernels ----


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


def test_a_case_that_is_not_known_is_refused():
    with pytest.raises(FileFormatError, match=r"'transpose\.row': what it moves is not known"):
        roofline.bytes_per_element("transpose.row")


def test_the_slower_limit_sets_the_time():
    few, many = (record("dual.rne+rne", alu) for alu in (64, 640))
    memory, vector = (roofline.kernel_time(r, 1.0, UNIT, ALL_OF_IT) for r in (few, many))
    assert (memory.bound, memory.seconds) == ("memory", 2 + 34 / 32)
    assert (vector.bound, vector.seconds) == ("vector", 10)
    halves = replace(ALL_OF_IT, memory_share=certain(0.5), vector_share=certain(0.25))
    assert roofline.kernel_time(many, 1.0, UNIT, halves) == roofline.Time(2 * (2 + 34 / 32), 40)


def test_slow_instructions_take_more_slots():
    plain = record("row.sr16", 640, "quantize_rows")
    assert roofline.slots(plain, FULL) == 10
    assert roofline.slots(plain | {"multiply32": 128}, FULL) == 10 + 3 * 2
    native = plain | {"notable": ["v_cvt_scalef32_pk_fp4_f32"]}
    slow = replace(FULL, convert_slots=certain(4))
    assert roofline.slots(native, slow) == 10 + 3 / 2
    assert roofline.slots(native | {"kernel": "quantize_both"}, slow) == 10 + 3
    assert roofline.slots(native, FULL) == 10


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


def test_ordered_blocks_are_multiplied_at_the_rate_of_bf16():
    """An instruction of one block of FP8 takes 16 cycles, and three vector instructions beside it 12."""
    blocks = record(
        "gemm.ordered",
        0,
        "_ordered_by_block",
        loop_matrix=32,
        loop_alu=96,
        notable=["v_mfma_f32_16x16x32_fp8_fp8"],
    )
    found = roofline.multiplication(blocks, Machine())
    assert found.matrix == pytest.approx(2 * 2**40 / Machine().matrix_flops("bf16"))
    assert found.vector / found.matrix == pytest.approx(12 / 16)
    assert found.bound == "matrix"


def test_folding_reads_codes_and_writes_a_byte():
    assert roofline.bytes_per_element("gemm.ordered.float32", roofline.FOLD) == 17 / 32 + 1
    folding = record("gemm.ordered.float32", 640, roofline.FOLD)
    assert roofline.kernel_time(folding, 1.0, UNIT, ALL_OF_IT) == roofline.Time(17 / 32 + 1, 10)


def test_peaks_are_those_of_the_data_sheet():
    machine = Machine()
    assert [machine.matrix_flops(f) / 1e15 for f in ("fp4", "fp8", "bf16")] == pytest.approx(
        [10.07, 5.03, 2.52], abs=0.01
    )
    assert machine.lane_operations * 2 * 2 / 1e12 == pytest.approx(157.3, abs=0.1)  # packed float32 FMA


# ---- the same rates, measured ----


def test_rates_are_measured_where_the_backend_computes(tmp_path):
    out = tmp_path / "rates.json"
    small = [f"--set=model.{k}={v}" for k, v in {"width": 64, "heads": 2, "kv_heads": 1, "ffn": 96}.items()]
    run = subprocess.run(
        [sys.executable, "-m", "projection.measure", "--tokens", "32", "--json", str(out), *small],
        env=os.environ | {"PYTHONPATH": str(TESTS), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    record = json.loads(out.read_text())
    rates = {r["name"]: r for r in record["rates"]}
    assert "portable conversions" in record["backend"]
    assert rates["copy"]["amount"] == 32 * 64 * 2 * 2
    assert rates["quantize X, h16"]["amount"] == 32 * 64 * (2 + 2 * 17 / 32)
    for name, (outputs, inputs) in {
        "q, o": (64, 64),
        "k, v": (32, 64),
        "gate, up": (96, 64),
        "down": (64, 96),
    }.items():
        assert rates[f"MXFP4 product, {name}"]["amount"] == 2 * 32 * outputs * inputs
        assert rates[f"MXFP4 product, {name}"]["assumption"] == "fp4_share"
        assert rates[f"BF16 product, {name}"]["assumption"] == "bf16_share"
    assert len(rates) == 1 + len(counted.ROTATIONS) + 2 * 4
    assert all(r["seconds"] > 0 for r in rates.values())


BOTH_PRODUCTS = """
import json, torch
from mxref_training.config import load_config
from mxref_triton import TritonBackend
from mxref_triton.products import matrix_cores, scale_range
from projection import measure

launched = []
def spied(module):
    launch = module.launch
    def spy(kernel, *arguments, **constants):
        launched.append(kernel.__name__)
        launch(kernel, *arguments, **constants)
    module.launch = spy

for module in (matrix_cores, scale_range):
    spied(module)
model = load_config("llama31_8b", ("model.width=64", "model.heads=2", "model.kv_heads=1", "model.ffn=96")).model
rates = measure.rates(TritonBackend(bounded="mfma"), torch.device("cpu"), 32, model)
found = []
for rate in rates:
    found.append((rate.name, rate.assumption, rate.format, rate.amount, launched[:]))
    launched.clear()
print(json.dumps(found))
"""


def test_the_kernel_of_packed_codes_is_timed_alone_and_in_a_product():
    run = subprocess.run(
        [sys.executable, "-c", BOTH_PRODUCTS],
        env=os.environ | {"PYTHONPATH": str(TESTS), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = {name: rest for name, *rest in json.loads(run.stdout)}
    for shape, (outputs, inputs) in {"q, o": (64, 64), "k, v": (32, 64), "down": (64, 96)}.items():
        flops = 2 * 32 * outputs * inputs
        alone, whole = (found[f"MXFP4 {what}, {shape}"] for what in ("GEMM kernel", "product"))
        assert alone == ["fp4_share", "fp4", flops, 2 * ["_multiply"]]  # once for each set of inputs
        assert whole == ["", "fp4", flops, 2 * ["_flag_scales", "_multiply"]]


def test_inputs_taken_in_turns_are_together_larger_than_any_cache():
    gpu = torch.device("cuda", 0)
    for elements in (32768 * 4096, 32768 * 14336, 16384**2, 4096**2):
        sets = measure.input_sets(elements, gpu)
        packed = elements * 17 / 32
        assert sets == 2 or (sets - 1) * packed < 2 * measure.LARGEST_CACHE <= sets * packed
        assert sets >= 2
    assert measure.input_sets(32 * 64, gpu) == 128  # as many as are captured in a graph
    assert measure.input_sets(4096**2, torch.device("cpu")) == 2


def test_a_measured_rate_is_a_share_of_the_peak_of_its_format():
    machine = replace(UNIT, memory=peak(8.0), fp4=peak(4.0), bf16=peak(2.0))
    assert measure.share(measure.Rate("", 2.0, 8.0, "B"), machine) == 0.5
    assert measure.share(measure.Rate("", 2.0, 4.0, "FLOP", format="fp4"), machine) == 0.5
    assert measure.share(measure.Rate("", 2.0, 4.0, "FLOP", format="bf16"), machine) == 1.0


# ---- assumptions and what was published ----


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


def test_shares_that_were_measured_here_are_those_of_the_record():
    path = newest("bench_gpu_nvidia-h200")
    record = read(path)
    # The largest product is at times slowed down by what ran before it; the high end of a share is what was reached.
    rates: dict[str, float] = {}
    for row in record["gemm"]:
        rates[row["name"]] = max(rates.get(row["name"], 0.0), row["per_second"])
    assumed = Assumptions()
    # The data sheet of the H200: 4.8 TB/s, 989.5 and 1979 TFLOP/s dense.
    assert assumed.memory_share.high == pytest.approx(record["copy_tb_per_s"] / 4.8, abs=0.02)
    assert assumed.bf16_share.high == pytest.approx(rates["cuBLAS bf16"] / 989.5e12, abs=0.02)
    assert assumed.fp8_share.high == pytest.approx(rates["cuBLAS fp8, tensor scales"] / 1979e12, abs=0.02)
    (ms,) = (r["ms"] for r in record["quantize"] if (r["name"], r["size"]) == ("dual, H16", 16384))
    issue_ms = 0.2019  # 25.2 instructions for each of 2^28 elements, by 132 SMs of 128 lanes at 1.98 GHz
    assert assumed.vector_share.nominal == pytest.approx(issue_ms / ms, abs=0.02)


def test_the_check_on_an_h200_shows_what_was_measured():
    path = newest("bench_gpu_nvidia-h200")
    record = read(path)
    shown = re.findall(
        r"   \* - ((?:row|dual), \w+)\n     - (\d+)\n     - (\d+)\n     - (\w+)",
        (DOCS / "explanation" / "projection.rst").read_text(),
    )
    assert len(shown) == 5
    assert f"measured on {record['machine']['date']}" in (DOCS / "explanation" / "projection.rst").read_text()
    for name, computed, measured, binds in shown:
        (ms,) = (r["ms"] for r in record["quantize"] if (r["name"], r["size"]) == (name, 16384))
        assert int(measured) == pytest.approx(ms * 1e3, rel=0.04)  # what another run may differ by
        if binds == "memory":
            moved = (2 + 17 / 32 * (2 if name.startswith("dual") else 1)) * 2**28
            assert int(computed) == pytest.approx(moved / record["copy_tb_per_s"] / 1e6, rel=0.03)


@pytest.mark.parametrize("key", [a.key for a in ARMS])
def test_low_is_slow_and_high_is_fast(key):
    slow, nominal, fast = (total(PROJECTION.at(level).times(arm(key))) for level in Level)
    assert fast < nominal < slow


def test_each_assumption_moves_something():
    for name, (low, high) in PROJECTION.ends().items():
        assert low.quantities() != high.quantities(), name


def test_published_numbers_are_data_alone():
    numbers = {p.value for p in published.PUBLISHED}
    assert {29.90, 35.67, 1.08} <= numbers
    package = ROOT / "backends" / "mxref_triton" / "projection"
    for path in package.glob("*.py"):
        constants = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        found = {c for c in constants if isinstance(c, float) and c in numbers}
        assert path.name == "published.py" or not found, path.name
        names = re.findall(r"\bPUBLISHED\b", path.read_text())
        assert bool(names) == (path.name in ("published.py", "compare.py", "page.py")), path.name
    assert all(p.source for p in published.PUBLISHED)


def test_comparisons_are_ordered_and_judged():
    for c in compare(PROJECTION):
        assert c.low <= c.nominal <= c.high
        assert c.deviation == pytest.approx(c.nominal / c.published.value - 1)
        far = replace(c, published=replace(c.published, bound="=", value=c.high * 2))
        assert far.verdict == "outside the bounds"
        assert replace(far, published=replace(far.published, value=c.nominal)).verdict == "within the bounds"
        missed = replace(c, published=replace(c.published, bound=">", value=c.nominal))
        assert missed.verdict == "missed"
    spreads = [s.spread for s in sensitivities(PROJECTION)]
    assert spreads == sorted(spreads, reverse=True)


# ---- the page and the command ----


def test_the_page_shows_what_its_counts_give():
    assert parts()[TABLES] == tables_text(PROJECTION, DOCUMENT)


def test_what_looks_at_scales_is_no_row_of_the_page():
    more = replace(
        PROJECTION, records=[*PROJECTION.records, record("gemm.bounded.float32", 99, "_flag_scales")]
    )
    assert tables_text(more, DOCUMENT) == tables_text(PROJECTION, DOCUMENT)


def test_recorded_results_are_what_the_counts_give():
    assert results(PROJECTION) == DOCUMENT["results"]


def test_the_plot_shows_the_steps_of_the_page():
    shown = re.findall(r">(\d+) ms<", parts()[PLOT])
    assert shown == [f"{total(PROJECTION.times(a)) * 1e3:.0f}" for a in ARMS]


def test_the_text_of_the_page_names_no_number_that_is_computed():
    text = (DOCS / "explanation" / "projection.rst").read_text(encoding="utf-8")
    computed = {f"{v:.{n}f}" for v in PROJECTION.quantities().values() for n in (1, 2, 3)}
    assert not computed & set(re.findall(r"\d+\.\d+", text))


def test_counts_are_of_the_target_and_spill_nothing():
    assert {r["target"] for r in DOCUMENT["records"]} == {counted.TARGET}
    assert not any(r["spills"] for r in DOCUMENT["records"])
    wanted = {r["case"] for r in RECORDS}
    assert wanted <= {r["case"] for r in DOCUMENT["records"]}


def test_the_command_writes_what_it_read(tmp_path):
    out = tmp_path / "out.json"
    found = CliRunner().invoke(main, ["--counts", str(COUNTS), "--json", str(out)])
    assert found.exit_code == 0, found.output
    assert "Computed, not measured" in found.output
    for title in ("One step", "Beside what was published", "What moves the result", "Kernels", "Assumptions"):
        assert title in found.output
    assert json.loads(out.read_text()) == DOCUMENT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "has no counts in it"),
        (json.dumps({"triton": "0.0.0", "records": []}), "counted by Triton 0.0.0"),
    ],
)
def test_a_file_without_counts_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "counts.json"
    if content is not None:
        path.write_text(content)
    found = CliRunner().invoke(main, ["--counts", str(path)])
    assert found.exit_code == 1
    assert message in found.output
    assert len(found.output.strip().splitlines()) == 1


def test_other_numbers_of_cards_share_the_batch():
    one, eight = (projection_of(DOCUMENT, cards) for cards in (1, 8))
    products = [p.times(arm("h16"))[Pass.FORWARD, Part.FPROP] for p in (one, eight)]
    assert products[0] == pytest.approx(8 * products[1])
    assert one.times(arm("h16"))[Pass.FORWARD, Part.COMMUNICATION] == 0
    assert not any(c.published.key.endswith("samples/s") for c in compare(one))
    refused = CliRunner().invoke(main, ["--counts", str(COUNTS), "--cards", "5"])
    assert refused.exit_code == 1
    assert "5 cards with 2 sequences each do not divide a batch of 32" in refused.output


def test_a_missing_count_is_refused():
    with pytest.raises(FileFormatError, match=r"0 kernels of case 'train\.x\.h16\.native'"):
        step_times(TINY, arm("h16"), RECORDS[1:2], UNIT, FULL)
