"""Effects that nobody can place: those of a thread that knows of no simulation, while one is open.

1. Which simulated process does something is a context variable. A thread that a step starts itself (`threading.Thread`, an
   executor) begins without it, so what it does would be counted outside, where no exploration looks.
2. While a simulation is open, such an effect is refused. It is raised again as the simulation ends in order, since what a thread
   raises is often heard by nobody.
3. Outside of any simulation are the main thread, and threads in which a simulation is open or waited for: a task of a test beside
   the simulation is no part of it. No step can have started these.

Rejected: to let threads inherit the context, which takes replacing `threading.Thread.start` under everybody's feet.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from perdure.testing.errors import EffectThreadError

__all__ = ["Watch", "check_thread", "watching"]

_lock: Final = threading.Lock()
_open: Final[list[Watch]] = []


class Watch:
    """A simulation that is open, seen from the thread that makes this."""

    def __init__(self) -> None:
        self.thread: int = threading.get_ident()
        self.error: EffectThreadError | None = None
        with _lock:
            _open.append(self)

    def end(self) -> None:
        """The simulation is over."""
        with _lock:
            _open.remove(self)

    def check(self) -> None:
        """See that no effect was refused for its thread.

        Raises:
            EffectThreadError: One was; the first.
        """
        if self.error is not None:
            raise self.error


@contextmanager
def watching() -> Generator[None]:
    """A simulation is open meanwhile.

    Raises:
        EffectThreadError: An effect was refused for its thread, and nothing else is raised.
    """
    watch = Watch()
    try:
        yield
    finally:
        watch.end()
    watch.check()


def check_thread(ledger: str, effect: str) -> None:
    """Of an effect that belongs to no simulated process: see that it is meant to.

    Args:
        ledger: The ledger's name.
        effect: The effect's name.

    Raises:
        EffectThreadError: Nobody can know.
    """
    if not _open or threading.current_thread() is threading.main_thread():
        return
    with _lock:
        if not _open or any(watch.thread == threading.get_ident() for watch in _open):
            return
        thread = threading.current_thread().name
        error = EffectThreadError(
            f"{ledger}: {effect} came from thread {thread!r}, which knows of no simulation, while one is open. Hand a thread "
            "that a step starts the context of the step: threading.Thread(target=contextvars.copy_context().run, "
            "args=(pay, 1999)), or executor.submit(contextvars.copy_context().run, pay, 1999). What is no part of a simulation "
            "is recorded in the main thread, or while none is open",
            ledger=ledger,
            effect=effect,
            thread=thread,
        )
        for watch in _open:
            watch.error = watch.error or error
    raise error
