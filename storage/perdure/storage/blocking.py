"""Blocking work of a store: in its own threads, or in place where there must be none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import trio

__all__ = ["Blocking"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Blocking:
    """Runs blocking work; once begun, it is carried through whatever is cancelled.

    Args:
        limiter: Bounds the threads, apart from those of user code.
        inline: Whether all is done in place, as virtual time needs: its clock would jump while a thread works.
    """

    def __init__(self, limiter: trio.CapacityLimiter, *, inline: bool) -> None:
        self._limiter = limiter
        self._inline = inline

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Do the work. A checkpoint, and waits for a free thread, unless all is inline."""
        if self._inline:
            return work(*args, **kwargs)
        with trio.CancelScope(shield=True):
            return await trio.to_thread.run_sync(partial(work, *args, **kwargs), limiter=self._limiter)
        raise AssertionError("nobody cancels the shielding scope")
