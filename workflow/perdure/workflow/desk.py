"""Sending to workflows that somebody runs: messages, which may have to wait for room, and requests, which wait for a reply.

1. Whoever sends holds the workflow's activation only while it sends. Who waits, for room or for a reply, holds nothing: the
   workflow may leave memory meanwhile, and come back.
2. Who waits counts as the workflow's next message: the workflow is brought in, so that it can make room or reply.
3. A message that was let in is made durable by its sender, cancelled or not; until then the activation is held for it.
4. A reply that is there is returned, whatever became of the workflow. Else the wait ends with the workflow, with the time
   that was set, and with whoever runs it.
5. A desk knows no supervisor: what it needs of those who run workflows is a `Site`.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from math import inf
from typing import Any, Protocol
from uuid import uuid4

import trio

from perdure.storage import DecodeError, decode_value, layout
from perdure.workflow.activation import Activation
from perdure.workflow.checks import check_duration, check_message_id
from perdure.workflow.control import deliver, send
from perdure.workflow.errors import (
    NotARequestError,
    RequestTimeoutError,
    RequestUnansweredError,
)
from perdure.workflow.requests import Asker, Askers
from perdure.workflow.senders import Envelope, Place, Senders
from perdure.workflow.typed import wanted
from perdure.workflow.types import Message

__all__ = ["Desk", "Site", "find_reply"]


class Site(Protocol):
    """Where workflows are run."""

    def visiting(self, workflow_id: str) -> AbstractAsyncContextManager[Activation]:
        """Hold the workflow's activation, loaded if it is not in memory."""
        ...

    async def ensure_running(self, workflow_id: str) -> None:
        """See that the workflow runs if there is something to do."""
        ...

    def hold(self, workflow_id: str) -> object:
        """Hold the activation that is in memory; what is returned is for `let_go`."""
        ...

    async def let_go(self, held: Any) -> None:
        """Hold it no longer."""
        ...


async def find_reply(activation: Activation, request_id: str) -> bytes | None:
    """The reply to a request, or `None` while there is none; durable on return.

    Raises:
        NotARequestError: A message with this id was sent that was no request.
        RequestUnansweredError: The workflow has ended, and has not completed the request.
        DecodeError: It was completed, and the reply is gone.
    """
    requests, history = activation.requests, activation.history
    if requests.is_answered(request_id):
        await activation.commit_from_outside()  # the reply may still be on its way to the disk
        reply = await activation.driver.get(layout.reply_key(request_id))
        if reply is None and requests.is_answered(
            request_id
        ):  # not forgotten meanwhile, so whoever waits would do so for ever
            raise DecodeError(
                f"workflow {history.workflow_id!r} has completed the request {request_id!r}, and its reply is not stored; the "
                "namespace is damaged"
            )
        return reply
    if not requests.is_open(request_id):
        await activation.mailbox.load_known_ids(activation.driver)
        if activation.mailbox.is_known(request_id) and not requests.is_known(request_id):
            raise NotARequestError(
                f"a message with the id {request_id!r} was sent to workflow {history.workflow_id!r} that was no request, so "
                "nobody will reply to it; ask with another id",
                workflow_id=history.workflow_id,
                request_id=request_id,
            )
    elif history.state.is_terminal:
        await activation.commit_from_outside()
        raise RequestUnansweredError(
            f"workflow {history.workflow_id!r} is {history.state.value}, and has not completed the request {request_id!r}",
            workflow_id=history.workflow_id,
            state=history.state.value,
            request_id=request_id,
        )
    return None


class Desk:
    """Where messages for workflows are handed in.

    Attributes:
        senders: Those who wait for room.
        askers: Those who wait for replies.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self.senders: Senders = Senders(site.hold)
        self.askers: Askers = Askers()

    async def post(self, workflow_id: str, name: str, body: object, message_id: str | None) -> None:
        """Send a message, waiting for room if there is none; durable on return."""
        await self._post(workflow_id, name, body, message_id, is_request=False)

    async def post_nowait(self, workflow_id: str, name: str, body: object, message_id: str | None) -> None:
        """Send a message if there is room; durable on return."""
        async with self._site.visiting(workflow_id) as activation:
            await send(activation, Envelope(name, body, message_id, bytes_max=activation.user_bytes_max))
        await self._site.ensure_running(workflow_id)

    async def request(
        self,
        workflow_id: str,
        name: str,
        body: object,
        timeout: float | None,
        request_id: str | None,
        reply_type: Any,
    ) -> Any:
        """Send a request and wait for the reply; see `WorkflowHandle.request`."""
        seconds = inf if timeout is None else check_duration(timeout, "timeout", "timeout=30 (or timeout=None)")
        checked_id = str(uuid4()) if request_id is None else check_message_id(request_id)
        converter = wanted(reply_type)
        with trio.move_on_after(seconds):
            data = await self._ask(workflow_id, name, body, checked_id)
            value = decode_value(data)
            if converter is None:
                return value
            return converter.convert(value, what=f"the reply to request {name!r} ({checked_id})", root="reply")
        raise RequestTimeoutError(
            f"workflow {workflow_id!r} did not reply to request {name!r} within {seconds:g} seconds; ask again with "
            f"id={checked_id!r}: if it was sent, it is not sent a second time, and its reply is kept",
            workflow_id=workflow_id,
            name=name,
            request_id=checked_id,
            timeout=seconds,
        )

    async def undelivered(self, workflow_id: str) -> tuple[Message[Any], ...]:
        """What is in the mailbox, durably."""
        async with self._site.visiting(workflow_id) as activation:
            await activation.commit_from_outside()
            waiting = [letter.message for letter in activation.mailbox.waiting()]
        return tuple(
            Message(message.id, message.name, decode_value(message.body), message.sent_at_ms / 1000)
            for message in waiting
        )

    # Messages.

    async def _post(
        self, workflow_id: str, name: str, body: object, message_id: str | None, *, is_request: bool
    ) -> bytes | None:
        """Send; returns the reply to a request that has one already."""
        site = self._site
        place: Place | None = None
        try:
            async with site.visiting(workflow_id) as activation:
                envelope = Envelope(name, body, message_id, bytes_max=activation.user_bytes_max, is_request=is_request)
                if is_request and message_id is not None:
                    reply = await find_reply(activation, message_id)
                    if reply is not None:
                        return reply
                place = await send(activation, envelope, senders=self.senders)
            await site.ensure_running(workflow_id)
            if place is not None:
                await self._wait(place)
        finally:
            if place is not None:
                await self._leave(place)
        if place is not None:
            place.check()
            await site.ensure_running(workflow_id)
        return None

    async def _wait(self, place: Place) -> None:
        while not place.is_decided:
            await place.wait()
            if place.must_look:
                await self._look(place)

    async def _look(self, place: Place) -> None:
        async with self._site.visiting(place.workflow_id) as activation:
            await activation.mailbox.load_known_ids(activation.driver)
            place.looked()
            self.senders.let_in(activation)

    async def _leave(self, place: Place) -> None:
        self.senders.withdraw(place)
        if place.activation is None:
            return
        try:
            await deliver(place.activation, place.letter)
        finally:
            await self._site.let_go(place.held)

    # Requests.

    async def _ask(self, workflow_id: str, name: str, body: object, request_id: str) -> bytes:
        # From before it is sent, so that no reply comes unheard.
        asker = self.askers.join(workflow_id, request_id)
        try:
            reply = await self._post(workflow_id, name, body, request_id, is_request=True)
            while reply is None:
                await asker.wait()
                reply = asker.reply
                if reply is None and asker.must_look:
                    reply = await self._find(asker)
            return reply
        finally:
            self.askers.leave(asker)

    async def _find(self, asker: Asker) -> bytes | None:
        asker.looked()
        async with self._site.visiting(asker.workflow_id) as activation:
            return await find_reply(activation, asker.request_id)

    # What the site tells.

    def admitted(self, activation: Activation, mailbox_limit: int) -> None:
        """A workflow came into memory: let in whoever waits and fits, and let those look whose replies are there."""
        activation.mailbox_limit = mailbox_limit
        activation.senders = self.senders
        activation.askers = self.askers
        self.senders.let_in(activation)
        self.askers.ask_to_look(activation.history.workflow_id, activation.requests.is_answered)
