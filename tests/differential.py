"""Whole arrays through the scalar oracle, for comparison with the reference and with every backend."""

import numpy as np

import oracle
from oracle import plan as oracle_plan
from oracle import random as oracle_random


def element_of(spec):
    """The oracle's own description of a spec's element format."""
    return oracle.ELEMENTS[spec.format.element.name]


def scale_of(spec):
    """The oracle's own description of a spec's scale format."""
    return oracle.SCALES[spec.format.scale.name]


def oracle_quantize(x, spec, stream=None, row_start=0, length=None, first=0):
    """Codes [N, K] and scale codes [N, K / k] of float32 rows, block axis last, by the scalar oracle.

    The rows lie at `row_start` and column `first` of a global tensor whose rows have `length` elements.
    """
    length = length or x.shape[1]
    bits = x.view(np.uint32).tolist()
    return _blocks(bits, x.shape[1], spec, stream, lambda r, c: (row_start + r) * length + first + c)[:2]


def oracle_quantize_array(x, spec, stream=None, **where):
    """Codes and scale codes of any array; see `oracle_quantize_tensor`."""
    return oracle_quantize_tensor(x, spec, stream, **where)[:2]


def oracle_quantize_tensor(
    x, spec, stream=None, *, axis=-1, origin=None, global_shape=None, pad=False, amax=None
):
    """Codes [rows..., K], scale codes [rows..., K / k] and the bits of the tensor's scale, None without one.

    By the scalar oracle and its own plan. `amax` is the largest finite magnitude of the whole tensor as float32 bits.

    Raises:
        oracle_plan.Refused: the specification refuses the request.
    """
    k = spec.format.k
    place = oracle_plan.place(
        x.shape, axis, spec.hadamard, k=k, height=height_of(spec), origin=origin, whole=global_shape, pad=pad
    )
    if spec.format.tensor_scale and amax is None and place.whole != place.shape:
        raise oracle_plan.Refused("scale.tensor.amax: a part does not know the tensor's amax")
    words = np.ascontiguousarray(x.astype(np.float32)).view(np.uint32)
    rows = list(place.rows())
    sources = [[place.source(row, column) for column in range(place.stored)] for row in rows]
    bits = [[0 if source is None else int(words[source]) for source in row] for row in sources]
    first = [place.index(row, 0) for row in rows]
    codes, scales, tensor = _blocks(bits, place.stored, spec, stream, lambda r, c: first[r] + c, amax)
    lengths = place.others(place.shape)
    return codes.reshape(*lengths, place.stored), scales.reshape(*lengths, place.stored // k), tensor


def height_of(spec):
    """The rows of a spec's tiles, 1 where it has none; its text is rows by columns."""
    rows, columns = map(int, spec.block.split("x"))
    assert columns == spec.format.k
    return rows


def _blocks(bits, length, spec, stream, index, amax=None):
    """Codes, scales and tensor scale of stored rows of float32 bits; `index` gives a column's random index."""
    rows, k, element, scale = len(bits), spec.format.k, element_of(spec), scale_of(spec)
    if spec.hadamard:
        n, policy = spec.hadamard, spec.signs.value
        where = (0, 0, 0, 6)
        if stream and policy != "none":
            where = (stream.seed, stream.step, stream.layer, oracle_plan.sign_id(stream.operand))
        signs = oracle_random.sign_vector(n, *where, policy)
        bits = [
            [b for i in range(0, length, n) for b in oracle_random.hadamard(row[i : i + n], signs)]
            for row in bits
        ]
    tensor = None
    order = None if spec.arithmetic.value == "real" else spec.arithmetic.value
    if spec.format.tensor_scale:
        if amax is None:
            amax = oracle.tensor_amax([b for row in bits for b in row])
        tensor = (
            oracle.tensor_scale(amax, element, scale, spec.four_over_six.value != "off")
            if order is None
            else oracle.tensor_scale_in(order, amax, element, scale)
        )
    height = height_of(spec)
    codes = np.zeros((rows, length), np.uint8)
    scales = np.zeros((rows, length // k), np.uint8)
    for top in range(0, rows, height):
        for block in range(length // k):
            cells = [(top + i, k * block + j) for i in range(height) for j in range(k)]
            random = None
            if spec.rounding.value == "sr":
                where = (stream.seed, stream.step, stream.layer, stream.operand)
                random = [oracle_random.sr_integer(*where, index(r, c), spec.sr_bits) for r, c in cells]
            byte, block_codes = oracle.quantize_block(
                [bits[r][c] for r, c in cells],
                spec.scale_rule.value,
                spec.rounding.value,
                zero_scale=spec.zero_scale,
                prescale=spec.prescale,
                r=random,
                R=spec.sr_bits,
                element=element,
                scale=scale,
                tensor=oracle.ONE if tensor is None else tensor,
                order=order,
                tensor_amax=amax or 0,
                four_over_six=spec.four_over_six.value,
            )
            scales[top : top + height, block] = byte
            for (r, c), code in zip(cells, block_codes, strict=True):
                codes[r, c] = code
    return codes, scales, tensor


def bits_of(array):
    """The bit patterns of a float array, every NaN as one and the same."""
    array = np.array(array)
    words = array.view(f"u{array.itemsize}").copy()
    words[np.isnan(array.astype(np.float32))] = np.uint64(0x7FC00000) >> np.uint64(32 - 8 * array.itemsize)
    return words


def assert_same_blocks(got_codes, got_scales, want_codes, want_scales, names=None):
    """Fail on the first block that differs, showing it."""
    k = got_codes.shape[-1] // max(got_scales.shape[-1], 1)
    wrong = (got_scales != want_scales) | (got_codes != want_codes).reshape(*got_scales.shape, k).any(-1)
    if wrong.any():
        where = tuple(np.argwhere(wrong)[0])
        block = (*where[:-1], slice(k * where[-1], k * where[-1] + k))
        name = names[where[0]] if names is not None else where
        raise AssertionError(
            f"{int(wrong.sum())} blocks differ, first {name}: scale got {got_scales[where]} want {want_scales[where]}; "
            f"codes got {got_codes[block].tolist()} want {want_codes[block].tolist()}"
        )
