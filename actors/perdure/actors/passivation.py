"""Passivation: live workflows that only wait leave memory, longest idle first.

1. A workflow is idle from the moment at which all its branches wait; while anything runs in it, or an operation holds it,
   it stays.
2. It leaves after `idle_timeout`, or earlier when others need its place. Leaving is an eviction: what is recorded stays,
   the alarm is armed, and its next message, alarm or wake brings it back.
3. Whether a message meets it before or after is decided in one step of the scheduler: an actor that is leaving takes none,
   and whoever has one for it waits until it is gone, and brings it back.
4. One task keeps the time for all.
"""

from __future__ import annotations

import trio

from perdure.actors.actor import Actor

__all__ = ["Passivation"]


class Passivation:
    """The idle actors of a supervisor, in the order in which they became idle.

    Args:
        idle_timeout: Seconds after which an idle actor leaves; infinity for never.

    Attributes:
        count: How many were passivated.
    """

    def __init__(self, idle_timeout: float) -> None:
        self.count: int = 0
        self._idle_timeout = idle_timeout
        self._idle: dict[str, Actor] = {}
        self._leaving: set[str] = set()
        self._has_idle = trio.Event()

    def note_idle(self, actor: Actor) -> None:
        """All branches of a live workflow wait from now on."""
        self._idle.pop(actor.workflow_id, None)
        self._idle[actor.workflow_id] = actor
        self._has_idle.set()

    def forget(self, actor: Actor) -> None:
        """An actor is gone."""
        self._leaving.discard(actor.workflow_id)
        if self._idle.get(actor.workflow_id) is actor:
            del self._idle[actor.workflow_id]

    def make_room(self, wanted: int) -> None:
        """Let idle actors leave until this many are leaving, longest idle first, as far as there are any."""
        for actor in list(self._idle.values()):
            if len(self._leaving) >= wanted:
                return
            self._passivate(actor)

    def _passivate(self, actor: Actor) -> bool:
        """Let an actor leave, if it is idle still; one that is not comes back here when it is."""
        # One that was woken and has not run yet is at work: evicted, it would stay away until somebody asks for it.
        if not actor.activation.is_at_rest or not actor.is_usable:
            del self._idle[actor.workflow_id]
        elif actor.in_use == 0:
            del self._idle[actor.workflow_id]
            self._leaving.add(actor.workflow_id)
            self.count += 1
            actor.is_passivated = True
            actor.evict()
            return True
        return False

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Passivate what has been idle for too long, for ever."""
        while True:
            if not self._idle:
                self._has_idle = trio.Event()
                await self._has_idle.wait()
                continue  # it may have had to make room meanwhile
            actor = next(iter(self._idle.values()))
            since = actor.activation.quiet_since
            if since is None:
                del self._idle[actor.workflow_id]
            elif since + self._idle_timeout > trio.current_time():
                await trio.sleep_until(since + self._idle_timeout)
            elif not self._passivate(actor) and self._idle.get(actor.workflow_id) is actor:
                # An operation holds it for a moment: it is looked at again, after the others.
                self.note_idle(actor)
                await trio.sleep(min(self._idle_timeout, 0.1) or 0.1)
