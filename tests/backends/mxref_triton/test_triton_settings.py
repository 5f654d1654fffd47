"""A setting of the process that products change for the time of a call."""

import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref_triton.products.by_value import _one_rounding

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _restored():
    allowed = MATMUL.allow_bf16_reduced_precision_reduction
    yield
    MATMUL.allow_bf16_reduced_precision_reduction = allowed


def test_a_second_thread_neither_restores_too_early_nor_what_the_first_one_set():
    MATMUL.allow_bf16_reduced_precision_reduction = True
    inside, first_left, seen = threading.Event(), threading.Event(), []

    def second():
        with _one_rounding():
            inside.set()
            assert first_left.wait(60)
            seen.append(MATMUL.allow_bf16_reduced_precision_reduction)

    thread = threading.Thread(target=second)
    with _one_rounding():
        thread.start()
        inside.wait(0.2)  # it waits, or would have read what this thread set
        seen.append(MATMUL.allow_bf16_reduced_precision_reduction)
    first_left.set()
    thread.join()
    assert seen == [False, False]
    assert MATMUL.allow_bf16_reduced_precision_reduction


def test_a_stricter_setting_of_the_user_stays():
    if not hasattr(MATMUL, "allow_bf16_reduced_precision_reduction_split_k"):
        pytest.skip("this PyTorch has one setting")
    MATMUL.allow_bf16_reduced_precision_reduction = False, False
    with _one_rounding():
        assert not MATMUL.allow_bf16_reduced_precision_reduction_split_k
    assert not MATMUL.allow_bf16_reduced_precision_reduction_split_k


def test_an_error_restores_the_setting():
    MATMUL.allow_bf16_reduced_precision_reduction = True
    with pytest.raises(ValueError, match="of BLAS"), _one_rounding():
        raise ValueError("of BLAS")
    assert MATMUL.allow_bf16_reduced_precision_reduction
