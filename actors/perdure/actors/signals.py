"""SIGINT and SIGTERM for programs that ask for it: the first ends in order, the second faster, the third at once.

1. The first is a request to end in order. The second ends the grace of running steps, and no more than that: all that was
   acknowledged is durable, what is cut short goes on at the next start.
2. The third ends the process here and now, in the handler itself, since whatever else would do it may be what hangs. To
   the store that is a crash, which it is made for.

Rejected: Trio's `open_signal_receiver`, whose signals wait for the loop. A step that computes without end never gives way
to it, and the third signal is for that program, too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

from perdure.workflow import InvalidArgumentError

__all__ = ["HANDLED", "Signals", "check_signals"]

HANDLED: Final = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a program in order."""


class Signals:
    """The handlers, from entering to leaving it. For the main thread.

    Args:
        on_first: Called in the handler with the signal's number; may raise, into whatever the main thread does.
        on_second: Called in the handler.
    """

    def __init__(self, on_first: Callable[[int], None], on_second: Callable[[], None]) -> None:
        self.received: list[int] = []
        self._on_first = on_first
        self._on_second = on_second
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in HANDLED:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def exit(self) -> SystemExit | None:
        """What the program ends with, if it was told to."""
        return SystemExit(128 + self.received[0]) if self.received else None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        match len(self.received):
            case 1:
                self._on_first(number)
            case 2:
                self._on_second()
            case _:
                os._exit(128 + number)


def check_signals(handle_signals: object) -> bool:
    """Whether this block is to handle signals, if it can.

    Raises:
        InvalidArgumentError: It cannot.
    """
    if not isinstance(handle_signals, bool):
        raise InvalidArgumentError(f"handle_signals must be True or False, not {handle_signals!r}")
    if handle_signals and threading.current_thread() is not threading.main_thread():
        raise InvalidArgumentError(
            "signals come to the main thread only, and this is another; leave out handle_signals="
        )
    return handle_signals
