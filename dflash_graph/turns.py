"""turns: a lock that threads take in turn."""

from __future__ import annotations

from threading import Lock, get_ident


class TurnLock:
    """A re-entrant lock that a thread cannot take again while others wait for it.

    A plain lock goes to whoever is quickest, and that is the thread that just gave it back: one
    that steps an engine in a loop would shut all others out.
    """

    def __init__(self) -> None:
        self._gate = Lock()  # held by the one thread that is next
        self._turn = Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = get_ident()
        if self._owner != me:
            with self._gate:
                self._turn.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._turn.release()
