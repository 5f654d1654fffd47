"""Texts to tokens, batch by batch in order, in this process or in several spawned ones."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.errors import DataError

if TYPE_CHECKING:
    from mxref_training.data.tokenizer import Tokenizer

_AHEAD = 2  # batches in flight for each worker, which bounds the memory

_worker: tuple[Tokenizer, str] | None = None
"""Of a worker process: its tokenizer and the dtype of its tokens."""


def encoded(batches: Iterable[list[str]], tokenizer: Tokenizer, dtype: str, workers: int) -> Iterator[bytes]:
    """Yield the tokens of every batch of texts, each text followed by the end token.

    Args:
        batches: lists of texts; at most two for each worker are taken ahead of the one that is yielded.
        tokenizer: the tokenizer.
        dtype: of the tokens, little-endian.
        workers: processes that encode; below 2, this process encodes, on all cores.

    Yields:
        Bytes of the tokens, the same for every number of workers, in the order of the batches.

    Raises:
        DataError: a worker raised or died.
    """
    if workers < 2:
        yield from (_encode(batch, tokenizer, dtype) for batch in batches)
        return
    context = get_context("spawn")  # a fork copies the locks of threads that hold them
    given = (tokenizer.to_table(), dtype)
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=given)
    try:
        rest = iter(batches)
        waiting = deque(pool.submit(_work, batch) for batch in itertools.islice(rest, _AHEAD * workers))
        while waiting:
            yield _result(waiting.popleft())
            waiting.extend(pool.submit(_work, batch) for batch in itertools.islice(rest, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(batch: list[str], tokenizer: Tokenizer, dtype: str) -> bytes:
    flat = [i for ids in tokenizer.encode_batch(batch) for i in (*ids, tokenizer.eot)]
    return np.array(flat, dtype=dtype).tobytes()


def _result(future: Future[bytes]) -> bytes:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process that makes tokens died; the kernel may have killed it for its memory: lower "
            "data.workers, or set it to 0"
        ) from error
    except Exception as error:  # whatever a tokenizer raises
        raise DataError(
            f"a worker process that makes tokens failed ({type(error).__name__}: {error}): set data.workers to 0 to "
            "see where"
        ) from error


def _begin(table: dict[str, str], dtype: str) -> None:
    """Prepare a worker: Ctrl-C is its parent's to handle, and it ends when the parent has ended in any way."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker
    from mxref_training.data.tokenizer import Tokenizer

    _worker = Tokenizer.from_table(table), dtype


def _end_with(sentinel: Any) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _work(batch: list[str]) -> bytes:
    assert _worker is not None
    return _encode(batch, *_worker)
