"""The floor of a training step is the arithmetic that it is said to be."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from torch.autograd import DeviceType

import mxref
import mxref_torch
from bench.bench_gpu_step import find, gpu_time
from bench.peers import make_linear
from bench.render_gpu_step import section
from bench.step_floor import BF16, FP8, Product, demand, fits_fp8, floor_of, multiplied_in
from mxref.formats import BLOCK_FORMATS
from mxref.recipe_files import recipe_from_table
from mxref.roles import GemmRole
from mxref_training.config import ModelConfig
from mxref_training.model.llama import Llama

WIDTH, FFN, VOCAB, TOKENS = 64, 96, 128, 192
CONFIG = ModelConfig(layers=1, width=WIDTH, heads=2, kv_heads=1, ffn=FFN, vocab=VOCAB, max_seq=TOKENS)
LAYERS = {
    "q": (64, 64),
    "k": (32, 64),
    "v": (32, 64),
    "o": (64, 64),
    "gate": (96, 64),
    "up": (96, 64),
    "down": (64, 96),
}
"""Outputs and inputs."""
READ = (64, 64, 64, 96)
"""Widths of the four tensors that the seven layers read."""


def recipe_of(name: str) -> mxref.Recipe:
    return recipe_from_table({"all": {"format": name}, "gemm": "bounded"})


def converted(recipe: mxref.Recipe) -> Llama:
    model = Llama(CONFIG)
    mxref_torch.convert(model, recipe, backend=mxref.get_backend("reference"))
    return model


@pytest.mark.parametrize(
    ("name", "type"),
    [
        ("mxfp4", FP8), ("mxfp4_e1m2", FP8), ("mxfp6_e2m3", FP8), ("mxfp6_e3m2", FP8),
        ("mxfp8_e4m3", BF16), ("mxfp8_e5m2", BF16), ("mxint8", BF16), ("nvfp4", BF16),
    ],
)  # fmt: skip
def test_operands_that_fit_fp8_are_multiplied_there(name: str, type: str) -> None:
    assert {multiplied_in(recipe_of(name), role) for role in GemmRole} == {type}


def test_the_backend_folds_just_the_formats_that_count_as_fp8() -> None:
    fold = pytest.importorskip("mxref_triton.products.fold")
    longer = [replace(made, k=64) for made in BLOCK_FORMATS.values() if made.scale.powers]
    for made in (*BLOCK_FORMATS.values(), *longer):
        assert fits_fp8(made) == fold.are_folded(SimpleNamespace(format=made)), made


def test_baselines_are_multiplied_in_their_own_type() -> None:
    for name in (BF16, FP8):
        assert {multiplied_in(find(name), role) for role in GemmRole} == {name}


@pytest.mark.parametrize(
    ("name", "bits", "k", "reads", "type"),
    [
        ("mxfp4", 4, 32, 1, 1),
        ("mxfp6_e2m3", 6, 32, 1, 1),
        ("mxfp8_e4m3", 8, 32, 1, 2),
        ("nvfp4", 4, 16, 2, 2),
    ],
)
def test_bytes_are_counted_by_hand(name: str, bits: int, k: int, reads: int, type: int) -> None:
    operand = 2 * (bits / 8 + 1 / k) + type  # codes and scale codes written and read, values written
    weights = sum(outputs * inputs for outputs, inputs in LAYERS.values())
    expected = (
        sum(READ) * TOKENS * (2 * reads + 2 * operand)
        + sum(outputs for outputs, _ in LAYERS.values()) * TOKENS * (2 * reads + 2 * operand)
        + 2 * weights * (4 * reads + operand)
    )
    assert demand(converted(recipe_of(name)), TOKENS).bytes == pytest.approx(expected, rel=1e-12)


def test_each_product_of_a_step_is_counted() -> None:
    found = demand(converted(recipe_of("mxfp4")), TOKENS).products
    assert sum(found.values()) == 3 * (len(LAYERS) + 1)
    assert found[Product(FP8, TOKENS, 96, 64)] == 2 + 1  # Fprop of gate and up, Dgrad of down
    assert found[Product(FP8, TOKENS, 64, 96)] == 1 + 2  # Fprop of down, Dgrad of gate and up
    assert found[Product(FP8, 96, 64, TOKENS)] == 2
    assert found[Product(FP8, 64, 96, TOKENS)] == 1
    head = [
        Product(BF16, TOKENS, VOCAB, 64),
        Product(BF16, TOKENS, 64, VOCAB),
        Product(BF16, VOCAB, 64, TOKENS),
    ]
    assert [found[product] for product in head] == [1, 1, 1]


def test_micro_batches_share_the_operands_of_weights() -> None:
    model = converted(recipe_of("mxfp4"))
    whole, split = demand(model, TOKENS), demand(model, TOKENS // 2, 2)
    assert split.bytes == pytest.approx(whole.bytes, rel=1e-12)
    assert sum(split.products.values()) == 2 * sum(whole.products.values())
    assert split.products[Product(FP8, TOKENS // 2, 96, 64)] == 2 * (2 + 1)


def test_layers_count_by_their_own_recipe_and_gemm() -> None:
    mixed = replace(recipe_of("mxfp4"), wgrad=recipe_of("nvfp4").wgrad)
    found = demand(converted(mixed), TOKENS).products
    assert found[Product(FP8, TOKENS, 96, 64)] == 2 + 1
    assert found[Product(BF16, 96, 64, TOKENS)] == 2


def test_plain_layers_and_bf16_move_no_bytes_of_operands() -> None:
    plain = Llama(CONFIG)
    make_linear(plain, "plain")
    for model in (plain, converted(find("bf16"))):
        found = demand(model, TOKENS)
        assert found.bytes == 0
        assert {product.type for product in found.products} == {BF16}
        assert sum(found.products.values()) == 3 * (len(LAYERS) + 1)


def test_the_floor_is_the_sum_of_its_parts() -> None:
    asked = demand(converted(recipe_of("mxfp4")), TOKENS)
    parts = {"gemm": 100.0, "quantize": 50.0, "optimizer": 3.0, "rest": 4.0}
    ms = {FP8: 0.5, BF16: 2.0}
    found = floor_of(parts, asked, lambda product: ms[product.type], asked.bytes / 6)
    assert found == {
        "gemm": 21 * 0.5 + 3 * 2.0,
        "quantize": pytest.approx(6),
        "measured": 7.0,
        "ms": pytest.approx(29.5),
    }


def test_every_kernel_of_a_product_counts_as_one() -> None:
    def kernel(name: str) -> Any:
        return SimpleNamespace(
            key=name, device_type=DeviceType.CUDA, is_user_annotation=False,
            device_time_total=1000.0, count=1,
        )  # fmt: skip

    products = [
        "nvjet_sm90_tst",
        "_fold",
        "_dequantize_quads",
        "_multiply_finish",
        "_bounded_misfits",
        "_ordered_folded",
    ]
    others = ["quantize_both", "multi_tensor_apply_kernel", "triton_poi_fused_0", "flash_fwd_kernel"]
    parts = gpu_time([kernel(name) for name in (*products, *others)])["parts"]
    assert parts == {"quantize": 1.0, "gemm": 6.0, "optimizer": 1.0, "rest": 2.0}


def test_the_page_has_a_floor_where_one_was_measured() -> None:
    row = {
        "mode": "captured", "ms": 150.0, "tokens_per_s": 1e5, "busy": 0.98, "peak_gib": 20.0, "activations_gib": 5.0,
        "repeated": 0,
    }  # fmt: skip
    floor = {"floor": {"ms": 120.0}, "of_floor": 1.25}
    shape = (
        "layers",
        "width",
        "heads",
        "kv_heads",
        "ffn",
        "vocab",
        "micro_batch",
        "micro_batches",
        "seq_len",
        "parameters",
    )
    record = {
        "model": dict.fromkeys(shape, 1), "machine": {"gpu": "GPU", "torch": "2", "date": "2026-11-28"},
        "steps": [row | {"recipe": "plain"}, row | {"recipe": "mxfp8"} | floor],
    }  # fmt: skip

    def table(headings: list[str], rows: Any) -> str:
        return "\n".join(";".join(line) for line in (headings, *rows))

    lines = section(record, table).splitlines()
    assert (
        "recipe;tokens/s;of plain;ms;floor, ms;of floor;deterministic, ms;busy;peak, GiB;activations, GiB"
        in lines
    )
    assert "`plain` captured;100,000;1.00;150.0;–;–;–;0.98;20.0;5.0" in lines
    assert "`mxfp8` captured;100,000;1.00;150.0;120.0;1.25;–;0.98;20.0;5.0" in lines
    del record["steps"][1]["floor"]
    assert "floor" not in section(record, table)
