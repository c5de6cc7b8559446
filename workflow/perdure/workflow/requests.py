"""Requests: messages whose sender waits for a reply, and the replies.

1. A request is a message with an id that is on record here as open, from the batch that puts it into the mailbox until the
   batch that records its completion. That batch holds the reply, too. So a reply is there if, and only if, the message
   counts as dealt with, wherever the process dies.
2. The id is what sender and reply share. A request whose id is on record is not sent a second time: if it is open its reply
   is waited for, otherwise the reply is here. So asking again is safe, after a timeout as after a restart of either side.
3. The last `REPLIES_MAX` replies are kept. Open requests are at most as many as messages wait, and `REPLIES_MAX` more that
   were read and not completed; the oldest are forgotten, and what completes them then replies to nobody.
4. Whoever waits for a reply holds nothing (`Askers`). It is told of the reply once that is durable; or asked to look, where the
   workflow left memory in a way that leaves open whether it is.
5. The reply lives under our own keys only. A message's record in history says nothing but that it was completed, as in the
   reference engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from perdure.storage import Driver, layout
from perdure.workflow.pending import Pending

__all__ = ["REPLIES_MAX", "Asker", "Askers", "Requests"]

REPLIES_MAX: Final = 1000
"""How many replies a workflow keeps."""


class Requests:
    """Which requests of one workflow are open, and which were answered."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._open: dict[str, int] = {}
        self._answered: dict[str, int] = {}
        self._answers = 0

    @classmethod
    async def load(cls, driver: Driver, pending: Pending) -> Requests:
        """Read what is on record; no reply is read."""
        requests = cls(pending)
        found: tuple[list[tuple[int, str]], list[tuple[int, str]]] = ([], [])
        for key, value in await driver.list(layout.REQUEST_PREFIX):
            is_answered, request_id = layout.parse_request_key(key)
            found[is_answered].append((layout.decode_u64(value), request_id))
        requests._answered = {request_id: number for number, request_id in sorted(found[True])}
        requests._answers = max(requests._answered.values(), default=0)
        # A batch that was cut may have left both; the reply is there then.
        requests._open = {
            request_id: number for number, request_id in sorted(found[False]) if request_id not in requests._answered
        }
        return requests

    def is_open(self, request_id: str) -> bool:
        """Whether it was sent and not completed yet."""
        return request_id in self._open

    def is_answered(self, request_id: str) -> bool:
        """Whether its reply is here."""
        return request_id in self._answered

    def is_known(self, request_id: str) -> bool:
        """Whether it was sent."""
        return request_id in self._open or request_id in self._answered

    def open(self, request_id: str, sequence: int, *, waiting: int) -> None:
        """Put on record what was just given this place in the mailbox, in which so many messages are now.

        Durable with the next commit, as the message is.
        """
        self._open[request_id] = sequence
        self._pending.put(layout.open_request_key(request_id), layout.encode_u64(sequence))
        while len(self._open) > waiting + REPLIES_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            self._pending.delete(layout.open_request_key(oldest))

    def answer(self, request_id: str, reply: bytes) -> None:
        """Record the reply to an open request; durable with the next commit, as the message's completion is."""
        self._answers += 1
        del self._open[request_id]
        self._answered[request_id] = self._answers
        self._pending.put(layout.reply_key(request_id), reply)
        self._pending.put(layout.answered_request_key(request_id), layout.encode_u64(self._answers))
        self._pending.delete(layout.open_request_key(request_id))
        while len(self._answered) > REPLIES_MAX:
            oldest = next(iter(self._answered))
            del self._answered[oldest]
            self._pending.delete(layout.answered_request_key(oldest))
            self._pending.delete(layout.open_request_key(oldest))
            self._pending.delete(layout.reply_key(oldest))


class Asker:
    """Somebody who waits for a reply.

    Attributes:
        workflow_id: Whose.
        request_id: To which request.
        reply: The reply, once it is there.
        must_look: Whether it is asked to look for it, by loading the workflow.
    """

    __slots__ = ("_error", "_news", "must_look", "reply", "request_id", "workflow_id")

    def __init__(self, workflow_id: str, request_id: str) -> None:
        self.workflow_id: str = workflow_id
        self.request_id: str = request_id
        self.reply: bytes | None = None
        self.must_look: bool = False
        self._error: Callable[[], Exception] | None = None
        self._news = trio.Event()

    async def wait(self) -> None:
        """Return once there is a reply, or it is asked to look.

        Raises:
            Exception: What the lines were closed with: no reply will come here.
        """
        await self._news.wait()
        if self.reply is None and self._error is not None:
            raise self._error()

    def answer(self, reply: bytes) -> None:
        """Here is the reply."""
        self.reply = reply
        self._news.set()

    def look(self) -> None:
        """Ask it to look."""
        self.must_look = True
        self._news.set()

    def looked(self) -> None:
        """It is about to look."""
        self.must_look = False
        if self.reply is None and self._error is None:
            self._news = trio.Event()

    def refuse(self, error: Callable[[], Exception]) -> None:
        """No reply will come here."""
        self._error = error
        self._news.set()


class Askers:
    """Those who wait for replies of some workflows."""

    def __init__(self) -> None:
        self._closed: Callable[[], Exception] | None = None
        self._waiting: dict[str, dict[str, set[Asker]]] = {}

    def join(self, workflow_id: str, request_id: str) -> Asker:
        """Wait for a reply from now on."""
        asker = Asker(workflow_id, request_id)
        if self._closed is not None:
            asker.refuse(self._closed)
        self._waiting.setdefault(workflow_id, {}).setdefault(request_id, set()).add(asker)
        return asker

    def leave(self, asker: Asker) -> None:
        """Wait no longer."""
        requests = self._waiting.get(asker.workflow_id, {})
        askers = requests.get(asker.request_id, set())
        askers.discard(asker)
        if not askers:
            requests.pop(asker.request_id, None)
        if not requests:
            self._waiting.pop(asker.workflow_id, None)

    def answer(self, workflow_id: str, request_id: str, reply: bytes) -> None:
        """A reply is durable."""
        for asker in self._waiting.get(workflow_id, {}).get(request_id, ()):
            asker.answer(reply)

    def ask_to_look(self, workflow_id: str, concerns: Callable[[str], bool] | None = None) -> None:
        """Let those look who wait for replies of this workflow; only those to whose request's id `concerns` says yes."""
        for request_id, askers in self._waiting.get(workflow_id, {}).items():
            if concerns is None or concerns(request_id):
                for asker in askers:
                    asker.look()

    def close(self, error: Callable[[], Exception]) -> None:
        """Send everybody away, and whoever comes."""
        self._closed = error
        for requests in self._waiting.values():
            for askers in requests.values():
                for asker in askers:
                    asker.refuse(error)

    def open(self) -> None:
        """Let askers wait."""
        self._closed = None
