"""What `bounded` multiplies again from codes: only listed rows, within the class, whoever of the programs is last."""

import numpy as np
import pytest
import torch

from interpreted.gemm_operands import bits, drawn, on
from mxref.gemm import bounded_tolerance, scaled_gemm
from mxref_triton.launch import DEVICE
from mxref_triton.products.fold import MISFIT_PROGRAMS, fold
from mxref_triton.products.misfits import multiply_misfits
from mxref_triton.products.ordered import ordered

UNTOUCHED = 7.0


def again(a, b, rows, columns, dtype=torch.float32):
    """Products over an output full of sevens, of operands whose misfits are said to be `rows` and `columns`."""
    left, right = fold(a), fold(b)
    for f, listed in ((left, rows), (right, columns)):
        f.misfits[0] = len(listed)
        f.misfits[1 : 1 + len(listed)] = torch.tensor(listed, dtype=torch.int32)
    out = torch.full((a.shape[0], b.shape[0]), UNTOUCHED, dtype=dtype)
    multiply_misfits(a, b, left, right, out)
    assert not left.done.any()  # as the next product of these operands needs it
    return out


def listed(shape, rows, columns):
    mask = np.zeros(shape, bool)
    mask[rows] = True
    mask[:, columns] = True
    return mask


@pytest.mark.clause("gemm.bounded", "gemm.nan")
@pytest.mark.parametrize(
    ("m", "n", "k", "rows", "columns"),
    [
        (40, 48, 1120, [37], []),  # one tile, whose 35 blocks are shared by all programs
        (20, 72, 544, [], [70, 3]),  # two tiles of two parts, the second of which is shorter
        (40, 100, 256, [5, 0], [99, *range(30)]),  # more tiles than programs
        (33, 40, 512, [], []),
    ],
)
def test_listed_rows_are_done_again_within_the_class(m, n, k, rows, columns):
    rng = np.random.default_rng(k)
    operands = [drawn(rng, size, k, 100, 150, nan=0.01) for size in (m, n)]
    a, b = (on(DEVICE, q) for q in operands)
    got, mask = again(a, b, rows, columns).numpy(), listed((m, n), rows, columns)
    assert (got[~mask] == UNTOUCHED).all()
    want = scaled_gemm(*operands, profile="exact").astype(np.float64)
    assert (np.isnan(got) == np.isnan(want))[mask].all()
    live = mask & ~np.isnan(want)
    bound = bounded_tolerance(*operands, "fp32") + 2.0**-24 * np.abs(want)  # `exact` is rounded too
    assert (np.abs(got - want) <= bound)[live].all()


@pytest.mark.clause("gemm.bounded", "gemm.output", "gemm.prescale")
def test_few_blocks_are_one_part_and_have_the_bits_of_ordered():
    rng = np.random.default_rng(0)
    a, b = (on(DEVICE, drawn(rng, size, 224, 60, 190)) for size in (30, 40))
    for q in (a, b):
        object.__setattr__(q, "prescale", True)
    for dtype in (torch.float32, torch.bfloat16):
        got, want = again(a, b, [3, 29], [0], dtype), ordered(a, b, str(dtype).rpartition(".")[2])
        mask = listed((30, 40), [3, 29], [0])
        assert (bits(got)[mask] == bits(want)[mask]).all()


def test_parts_are_added_in_the_order_of_blocks():
    """2^24 in the first part, ones in the others: added one after the other they are lost, together they are not."""
    assert MISFIT_PROGRAMS == 4
    a, b = (on(DEVICE, drawn(np.random.default_rng(0), 1, 1024, 127, 127)) for _ in range(2))
    for q in (a, b):
        q.codes.zero_()
        q.codes.view(32, 16)[::8, 0] = 2  # an element 1 at the beginning of each of four parts
        q.scales[0, 0] = 139
    assert again(a, b, [0], []).item() == 2.0**24
    for q in (a, b):
        q.scales[0, 0], q.scales[0, 24] = 127, 139
    assert again(a, b, [0], []).item() == 2.0**24 + 4  # 3 and 2^24, a tie that goes to even
