"""The first signal asks a run to stop, the second one acts at once, and a run leaves handlers as it found them."""

import os
import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from mxref_training import interrupt as interrupts
from mxref_training.distributed.ranks import SOLE
from mxref_training.interrupt import StopRequest
from rank_threads import on_ranks


@pytest.fixture(params=["default", "ignored"])
def before(request):
    """How SIGINT was handled when the process began: shells have it ignored by what they start with `&`."""
    handler = signal.default_int_handler if request.param == "default" else signal.SIG_IGN
    found = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, found)


@pytest.fixture
def clock(monkeypatch):
    """Seconds, which pass as a test says."""
    now = [1000.0]
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_signals_that_come_together_are_one_request(clock):
    """A service manager signals `torchrun` and its ranks, and `torchrun` passes its own signal on to them."""
    with StopRequest() as request:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            clock[0] += 0.9
        assert request.signal == "SIGTERM"


def test_a_second_signal_acts_at_once(before, clock):
    with StopRequest() as request:
        interrupt()
        assert request.signal == "SIGINT"
        clock[0] += 2
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_closed_terminal_asks_to_stop_unless_it_was_to_be_ignored():
    found = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with StopRequest() as request:
            assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGHUP)
        assert request.signal == "SIGHUP"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGHUP)
        assert request.signal == ""
    finally:
        signal.signal(signal.SIGHUP, found)


def test_handlers_are_given_back(before):
    for asked in (False, True):
        with StopRequest() as request:
            if asked:
                interrupt()
        assert bool(request.signal) == asked
        assert signal.getsignal(signal.SIGINT) is before
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_requests_within_each_other_take_a_signal_each(before, clock):
    with StopRequest() as outer, StopRequest() as inner:
        interrupt()
        assert (inner.signal, outer.signal) == ("SIGINT", "")
        clock[0] += 2
        interrupt()
        assert outer.signal == "SIGINT"
        clock[0] += 2
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is before


def test_all_ranks_learn_of_a_signal_that_one_received():
    request = StopRequest()
    request.signal = "SIGTERM"
    assert request.agreed(SOLE) == "SIGTERM"
    assert StopRequest().agreed(SOLE) == ""

    def after_a_step(signals):
        def work(ranks):
            own = StopRequest()
            own.signal = signals[ranks.rank]
            return own.agreed(ranks)

        return on_ranks(3, work)

    assert after_a_step(["", "", ""]) == [""] * 3
    assert after_a_step(["", "SIGTERM", ""]) == ["SIGTERM"] * 3
    assert len(set(after_a_step(["SIGINT", "", "SIGTERM"]))) == 1
