# pyright: reportPrivateUsage=false
"""The order in which Trio runs tasks, drawn from a seed.

1. Trio runs the tasks that are runnable at one moment in the order in which they became so, or in the reverse of that, by
   the toss of a coin: 2 of the 24 orders of four tasks. Inside `seeded_scheduling` it is any order at all, and the same one
   for the same seed.
2. Trio has one source of randomness for all of its runs. Ours asks which thread it is in, so that two runs in two threads do
   not disturb each other, and runs in other threads stay as they were.
3. It has no public way to do so: this module is the one place that reaches into it, and says so at once when Trio has changed.

Under Hypothesis draw the seed (`st.integers(0, 2**32 - 1)`): Hypothesis sets Trio's source back for every example, which
otherwise explores one order only.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, MutableSequence
from contextlib import contextmanager
from typing import Any, Final

from perdure.workflow import InvalidArgumentError

__all__ = ["seeded_scheduling"]


class _Sources(threading.local):
    """The sources of the calling thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[random.Random] = []


_sources: Final = _Sources()
_installed: Final = threading.Lock()
_users = 0


class _Scheduler:
    """Stands where Trio's own source of randomness stood."""

    def __init__(self, before: random.Random, *, was_deterministic: bool) -> None:
        self.before = before
        self._was_deterministic = was_deterministic

    def shuffle(self, batch: MutableSequence[Any]) -> None:
        """Order what is runnable. Trio has sorted it; where nobody asked for a seed, it does what it would have done."""
        if _sources.stack:
            _sources.stack[-1].shuffle(batch)
        elif self._was_deterministic:
            self.before.shuffle(batch)
        elif self.before.random() < 0.5:
            batch.reverse()

    def __getattr__(self, name: str) -> Any:
        return getattr(_sources.stack[-1] if _sources.stack else self.before, name)


@contextmanager
def seeded_scheduling(seed: int) -> Generator[None]:
    """Inside, whatever Trio runs in this thread is scheduled in an order that is drawn from `seed`.

    Args:
        seed: Any integer. The same program with the same seed runs in the same order, as long as it waits for nothing but
            virtual time.

    Raises:
        InvalidArgumentError: It is no integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgumentError(f"a seed is an integer, not {seed!r:.80}; write seed=7")
    _sources.stack.append(random.Random(seed))
    try:
        with _replaced():
            yield
    finally:
        _sources.stack.pop()


@contextmanager
def _replaced() -> Generator[None]:
    """Trio asks us, for as long as anybody in any thread needs it."""
    global _users
    with _installed:
        if _users == 0:
            _install()
        _users += 1
    try:
        yield
    finally:
        with _installed:
            _users -= 1
            if _users == 0:
                _restore()


_before: list[Callable[[], None]] = []
_OURS: Final = object()
"""What Trio's setting is while it is ours: as good as true, and known from what Hypothesis has Trio set it to meanwhile."""


def _install() -> None:
    from trio._core import _run

    was_deterministic, source = _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r

    def restore() -> None:
        setattr(_run, "_r", source)  # noqa: B010 - it is Final
        if _run._ALLOW_DETERMINISTIC_SCHEDULING is _OURS:  # pyright: ignore[reportUnnecessaryComparison]
            setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", was_deterministic)  # noqa: B010
        else:  # Hypothesis was imported inside, and was given our source of randomness, which goes now
            _run._hypothesis_plugin_setup()

    _before.append(restore)
    setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", _OURS)  # noqa: B010
    setattr(_run, "_r", _Scheduler(source, was_deterministic=was_deterministic))  # noqa: B010


def _restore() -> None:
    _before.pop()()
