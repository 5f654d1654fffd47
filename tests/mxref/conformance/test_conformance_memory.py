"""Memory that a backend must not change: operands, the bytes around them, and results of earlier calls."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from mxref import MXArray, OperandSpec, PreparedArray, quantize
from mxref.conformance import check
from mxref.conformance.watch import MARGIN, Watched
from mxref.reference import ReferenceBackend
from mxref.reference import backend as reference

pytestmark = pytest.mark.clause("conformance.protocol")


class GemmMutates(ReferenceBackend):
    """Spoils an operand after the product was taken."""

    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        b.scales[...] ^= 1
        return out


class GemmMutatesCodes(ReferenceBackend):
    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        a.codes[a.codes == 0x88] = 0
        return out


class DequantizeMutates(ReferenceBackend):
    def _dequantize(self, q, dtype):
        values = super()._dequantize(q, dtype)
        q.codes[...] = 0
        return values


class InPlace(ReferenceBackend):
    """Transforms float32 in place and returns its input."""

    def _hadamard(self, x, rotation, axis):
        y = super()._hadamard(x, rotation, axis)
        if x.dtype != np.float32 or not x.flags.writeable:
            return y
        x[...] = y
        return x


class Reuses(ReferenceBackend):
    """Writes every result of one shape to the same buffer."""

    def __init__(self, *operations):
        self.operations, self.buffers = operations, {}

    def _buffered(self, operation, array):
        if operation not in self.operations:
            return array
        buffer = self.buffers.setdefault((operation, array.shape, array.dtype), np.empty_like(array))
        buffer[...] = array
        return buffer

    def _quantize(self, x, plan):
        codes, scales = super()._quantize(x, plan)
        return self._buffered("codes", codes), self._buffered("scales", scales)

    def _dequantize(self, q, dtype):
        return self._buffered("dequantize", super()._dequantize(q, dtype))

    def _hadamard(self, x, rotation, axis):
        return self._buffered("hadamard", super()._hadamard(x, rotation, axis))

    def _scaled_gemm(self, a, b, profile, out_dtype):
        return self._buffered("gemm", super()._scaled_gemm(a, b, profile, out_dtype))

    def _fake_quantize(self, x, plan, dtype):
        return self._buffered("fake", super()._fake_quantize(x, plan, dtype))

    def _quantize_dual(self, x, row, column):
        pair = super()._quantize_dual(x, row, column)
        return tuple((self._buffered(f"dual{i}", codes), scales) for i, (codes, scales) in enumerate(pair))


def past_the_end(array):
    """Return the byte after an array's last: a kernel without a mask writes there."""
    end = np.ndarray((1,), np.uint8, array.base.view(np.uint8), _offset(array) + array.nbytes)
    return end


def _offset(array):
    return array.__array_interface__["data"][0] - array.base.__array_interface__["data"][0]


class WritesPastTheEnd(ReferenceBackend):
    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        if a.codes.size and a.codes.flags.c_contiguous:
            past_the_end(a.codes)[:] = 7
        return out


class AddsPastTheEnd(ReferenceBackend):
    def _add_product(self, a, b, onto, profile):
        super()._add_product(a, b, onto, profile)
        if onto.size:
            past_the_end(onto)[:] = 7


class ReadsPastTheEnd(ReferenceBackend):
    """Takes its last scale from beyond the array."""

    def _dequantize(self, q, dtype):
        if not q.scales.size or not q.scales.flags.c_contiguous:
            return super()._dequantize(q, dtype)
        scales = q.scales.copy()
        scales.flat[-1] = past_the_end(q.scales)[0]
        return super()._dequantize(replace(q, scales=scales), dtype)


class DualMutates(ReferenceBackend):
    def _quantize_dual(self, x, row, column):
        pair = super()._quantize_dual(x, row, column)
        if x.flags.writeable:
            x[np.isnan(x)] = 0
        return pair


@pytest.mark.parametrize(
    ("backend", "op", "clause", "message"),
    [
        (GemmMutates(), "gemm", "conformance.protocol", "bytes of its operand b (scales)"),
        (GemmMutatesCodes(), "gemm", "conformance.protocol", "bytes of its operand a (codes)"),
        (DequantizeMutates(), "dequantize", "conformance.protocol", "bytes of its operand q (codes)"),
        (InPlace(), "hadamard", "conformance.protocol", "bytes of its operand x"),
        (Reuses("codes"), "quantize", "conformance.protocol", "of a result that quantize had returned"),
        (Reuses("scales"), "quantize", "conformance.protocol", "of a result that quantize had returned"),
        (Reuses("dequantize"), "dequantize", "conformance.protocol", "a result that dequantize had returned"),
        (Reuses("hadamard"), "hadamard", "conformance.protocol", "a result that hadamard had returned"),
        (Reuses("gemm"), "gemm", "conformance.protocol", "a result that scaled_gemm had returned"),
        (Reuses("fake"), "quantize", "conformance.dual", "a result that fake_quantize had returned"),
        (Reuses("dual1"), "quantize", "conformance.dual", "a result that quantize_dual had returned"),
        (DualMutates(), "quantize", "conformance.dual", "bytes of its operand x"),
        (WritesPastTheEnd(), "gemm", "conformance.protocol", "scaled_gemm wrote outside of its arrays"),
        (AddsPastTheEnd(), "gemm", "conformance.dual", "add_product wrote outside of its arrays"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ReferenceBackend) else None,
)  # fmt: skip
def test_misuse_of_memory_is_found(backend, op, clause, message):
    clauses = ["conformance.protocol", "conformance.dual"]
    report = check(backend, ops=[op], clauses=clauses, level="quick", formats=["mxfp4"])
    # Fused operations are made of the others by default, and so misuse memory as they do.
    assert report.failing[0] == clause, [(f.clause, f.message) for f in report.failures]
    assert message in report.failures[0].message


def test_misuse_is_found_whatever_is_asked():
    """The calls of all checks are watched, not only those of the check for memory."""
    report = check(DequantizeMutates(), clauses=["dequantize.value"], level="quick")
    assert report.failing == ("conformance.protocol",)
    table = {result.clause: result for result in report.clauses}
    assert table["conformance.protocol"].failed > 2
    assert table["dequantize.value"].passed + table["conformance.protocol"].failed >= 6


def test_a_read_beyond_an_array_meets_poison():
    report = check(ReadsPastTheEnd(), clauses=["quantize.axis"], ops=["dequantize"], level="quick")
    assert report.failing == ("quantize.axis",)
    assert "nan" in report.failures[0].got


def test_an_answer_and_a_misuse_are_two_findings():
    class Both(ReferenceBackend):
        def _dequantize(self, q, dtype):
            values = super()._dequantize(q, dtype)
            q.codes[...] = 0
            return -values

    report = check(Both(), clauses=["dequantize.value"], level="quick")
    assert report.failing == ("conformance.protocol", "dequantize.value")


# ---- the watch itself ----


def layouts():
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    frozen = x.copy()
    frozen.flags.writeable = False
    return [
        x, x.T, x[::2, ::3], x[::-1, ::-1], np.broadcast_to(x[:1], (4, 6)), x[:0], np.zeros((), np.float32),
        frozen, x.astype(ml_dtypes.bfloat16), x.astype(np.uint8), x.astype(np.float64),
    ]  # fmt: skip


@pytest.mark.parametrize("array", layouts(), ids=lambda a: f"{a.dtype}{a.shape}{a.strides}")
def test_what_a_backend_is_given_is_the_array_between_poison(array):
    watched = Watched(reference)
    given = watched.from_numpy(array)
    assert (given.shape, given.strides, given.dtype) == (array.shape, array.strides, array.dtype)
    assert given.flags.writeable == array.flags.writeable
    assert given.tobytes() == array.tobytes()
    (room,) = watched._rooms
    poison = np.frombuffer(room.held, np.uint8)
    assert (poison[: MARGIN * array.itemsize] == 0xFF).all()
    assert (poison[-MARGIN * array.itemsize :] == 0xFF).all()
    assert array.size == 0 or given.__array_interface__["data"][0] > room.array.__array_interface__["data"][0]


def test_layouts_are_operands_and_prepare_may_share_its_own():
    class Layered(ReferenceBackend):
        def _prepare(self, q, profile):
            return (q.scales,)

        def _scaled_gemm(self, a, b, profile, out_dtype):
            if isinstance(b, PreparedArray):
                b.layout[0][...] = 99
            return super()._scaled_gemm(a, b, profile, out_dtype)

    watched = Watched(Layered())
    q = quantize(np.full((3, 32), 5, np.float32), OperandSpec())
    prepared = watched.prepare(q)
    assert watched.faults == []
    watched.scaled_gemm(MXArray(q.codes.copy(), q.scales.copy(), q.shape, 1), prepared)
    fault = "conformance.protocol", "scaled_gemm changed 3 bytes of its operand b (layout 0)"
    assert fault in watched.faults
    watched.start()
    assert watched.faults == []


def test_tensors_are_watched_as_arrays_are():
    torch = pytest.importorskip("torch")

    class Tensors(ReferenceBackend):
        """Copies on the way in, as to a device."""

        spoil = staticmethod(lambda x: None)

        def from_numpy(self, array):
            return torch.from_numpy(np.array(array))

        def to_numpy(self, array):
            return array.numpy()

        def _hadamard(self, x, rotation, axis):
            y = super()._hadamard(x.numpy(), rotation, axis)
            return self.spoil(x) if self.spoil(x) is not None else self.from_numpy(y)

    x = np.ones((4, 64), np.float32)
    for spoil, message in (
        (lambda x: None, None),
        (lambda x: x, "hadamard returned the memory of its operand x"),
        (lambda x: x.add_(1) if x.sum() == x.numel() else None, "hadamard changed 512 bytes of its operand x"),
        (lambda x: x.as_strided((1,), (1,), x.storage_offset() - 1).zero_().new_empty(0).sum().isnan() or None,
         "hadamard wrote outside of its arrays"),
    ):  # fmt: skip
        backend = Tensors()
        backend.spoil = spoil
        backend.capabilities = replace(reference.capabilities, arrays="torch")
        watched = Watched(backend)
        watched.hadamard(watched.from_numpy(x), 16)
        assert [text for _, text in watched.faults][:1] == ([message] if message else [])
