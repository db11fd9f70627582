"""TurnLock: threads in turn, and what interrupts one."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from dflash_graph.turns import TurnLock


def test_a_thread_that_waits_is_next() -> None:
    """Whoever steps in a loop does not shut others out."""
    lock, done = TurnLock(), threading.Event()
    turns: list[str] = []

    def other() -> None:
        for _ in range(5):
            with lock, lock:
                turns.append("other")
        done.set()

    thread = threading.Thread(target=other, daemon=True)
    with lock:
        thread.start()
        time.sleep(0.01)
    while not done.is_set():
        with lock:
            turns.append("mine")
            time.sleep(0.002)
    thread.join()
    assert turns.count("other") == 5 and turns.count("mine") < 50


def test_interrupts_do_not_lock_a_thread_out() -> None:
    """At whatever instruction an interrupt arrives, its thread can take the lock again."""
    lock = TurnLock()
    interrupts = 0

    class Interrupt(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    end = time.monotonic() + 1.0
    try:
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-4)
                while True:
                    with lock:
                        pass
            except Interrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 100
    with lock:
        pass


def test_a_handler_may_take_what_its_thread_waits_for() -> None:
    """It comes while the lock is with another thread: both get it once that one is done."""
    lock, held, handled = TurnLock(), threading.Event(), []

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(0.2)

    def handler(*_: Any) -> None:
        with lock:
            handled.append(True)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(10)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with lock:
            time.sleep(0.05)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    thread.join()
    assert handled == [True]


@pytest.mark.parametrize("depth", [1, 3])
def test_it_is_given_back_at_the_end(depth: int) -> None:
    lock, taken = TurnLock(), threading.Event()

    def take() -> None:
        with lock:
            taken.set()

    for _ in range(depth):
        lock.__enter__()
    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    for _ in range(depth):
        assert not taken.is_set()
        lock.__exit__()
    thread.join(10)
    assert taken.is_set()
