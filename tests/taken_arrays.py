"""Arrays that look like others: what every backend takes as which values, and what every backend refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.masked import masked_tensor

from mxref.errors import DtypeError
from mxref.mxarray import MXArray

BOTH = np.random.default_rng(31).standard_normal((64, 64)).astype(np.float32)
X = BOTH[:32, :32].copy()


def taken(library: str) -> dict[str, tuple[Any, NDArray[np.float32]]]:
    """Return inputs to a backend of a library, `numpy` or `torch`, by name, each with its values."""
    t, both = torch.from_numpy(X), torch.from_numpy(BOTH)
    tensors = {
        "negated view": (torch.complex(t, t).conj().imag, -X),
        "part of a negated view": (torch.complex(both, both).conj().imag[32:, ::2].t(), -BOTH[32:, ::2].T),
        "real part of a conjugate": (torch.complex(t, t).conj().real, X),
        "parameter": (torch.nn.Parameter(t), X),
        "expanded tensor": (t[:1].expand(32, 32), X[:1].repeat(32, 0)),
    }
    arrays = {
        "matrix": (X.view(np.matrix), X),
        "subclass": (X.view(type("Named", (np.ndarray,), {})), X),
        "read-only array": (np.frombuffer(X.tobytes(), np.float32).reshape(32, 32), X),
        "reversed array": (X[::-1, ::-1], X[::-1, ::-1].copy()),
    }
    return tensors if library == "torch" else tensors | arrays


def refused(library: str) -> dict[str, tuple[Any, str]]:
    """Return inputs that a backend of a library refuses, by name, each with a pattern of the message."""
    t = torch.from_numpy(X)
    both = {
        "masked array": (np.ma.masked_array(X, X > 0), r"masked array .* x\.filled\(0\)"),
        "masked tensor": (masked_tensor(t, t > 0), "MaskedTensor does not hold its elements"),
        "sparse tensor": (t.to_sparse(), r"layout torch.sparse_coo .* x\.to_dense\(\)"),
    }
    return both | ({"array": (X, "takes PyTorch tensors, got ndarray")} if library == "torch" else {})


def hold(backend: Any) -> None:
    """Assert that every operation of a backend takes what is taken, and refuses the rest."""
    library = backend.capabilities.arrays
    operations = {
        "quantize": lambda x: backend.quantize(x, "ocp").codes,
        "quantize_dual": lambda x: backend.quantize_dual(x, ("ocp", "ocp"))[1].codes,
        "fake_quantize": lambda x: backend.fake_quantize(x, "ocp"),
        "hadamard": lambda x: backend.hadamard(x, 16),
    }
    for name, (x, values) in taken(library).items():
        for operation, run in operations.items():
            got, want = (backend.to_numpy(run(each)) for each in (x, backend.from_numpy(values)))
            assert type(got) is np.ndarray, (operation, name)
            np.testing.assert_array_equal(got, want, err_msg=f"{operation} of {name}")
    for x, message in refused(library).values():
        for run in operations.values():
            with pytest.raises(DtypeError, match=message):
                run(x)
    _hold_operands(backend, backend.quantize(backend.from_numpy(X), "ocp"))


def _hold_operands(backend: Any, q: MXArray) -> None:
    """Assert that a stored operand is taken and refused as inputs are."""
    operations = {
        "dequantize": backend.dequantize,
        "left": lambda a: backend.scaled_gemm(a, q),
        "right": lambda b: backend.scaled_gemm(q, b),
        "prepared": lambda b: backend.scaled_gemm(q, backend.prepare(b)),
    }
    codes = backend.to_numpy(q.codes)
    forms = {
        "masked": np.ma.masked_array(codes, codes > 99),
        "matrix": codes.view(np.matrix),
        "tensor": torch.from_numpy(codes),
    }
    for form, given in forms.items():
        other = replace(q, codes=given)
        for name, run in operations.items():
            if form == "masked" or (form == "matrix" and backend.capabilities.arrays == "torch"):
                with pytest.raises(DtypeError, match="masked array|takes PyTorch tensors"):
                    run(other)
            else:
                got, want = (backend.to_numpy(run(each)) for each in (other, q))
                np.testing.assert_array_equal(got, want, err_msg=f"{name} of a {form}")
