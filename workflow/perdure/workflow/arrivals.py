"""Which messages of other workflows have come, so that one that is sent again is delivered once.

1. What a workflow sends has an id that derives from its seed and the place (`derived.derive_message_id`): a sender that died
   before it recorded that it had sent sends the same again.
2. A record is written in the batch that puts the message into the mailbox, by sender, so that no sender's records are pushed
   out by another's. The last `SENT_MAX` of each are kept: more than one workflow can have on their way to one target from
   the branches of one join.
3. Records are read when their sender sends something, and only those of that sender.
4. A sender that has completed or was cancelled sends nothing again; whoever hosts both has its records removed (`forget`),
   so that what is kept is bounded by the senders that live, not by all there ever were.
"""

from __future__ import annotations

from typing import Final

from perdure.storage import Driver, layout
from perdure.workflow.pending import Pending

__all__ = ["SENT_MAX", "Arrivals"]

SENT_MAX: Final = 2500
"""How many messages of each sender a workflow remembers."""


class Arrivals:
    """What is remembered of the messages that other workflows sent to one."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._by_sender: dict[str, dict[str, int]] = {}

    async def load(self, driver: Driver, sender: str) -> None:
        """Read what is remembered of a sender, once; the others need it."""
        if sender in self._by_sender:
            return
        pairs = await driver.list(layout.sender_prefix(sender))
        if sender not in self._by_sender:  # not read by another delivery meanwhile
            found = sorted((layout.decode_u64(value), layout.parse_sent_key(key)[1]) for key, value in pairs)
            self._by_sender[sender] = {message_id: sequence for sequence, message_id in found}

    async def senders(self, driver: Driver) -> list[str]:
        """All senders of whom something is remembered durably. Reads everything that is."""
        pairs = await driver.list(layout.SENT_PREFIX)
        return list(dict.fromkeys(layout.parse_sent_key(key)[0] for key, _ in pairs))

    def forget(self, sender: str) -> None:
        """Remove what is remembered of a sender, durably with the next commit."""
        self._by_sender.pop(sender, None)
        self._pending.delete_prefix(layout.sender_prefix(sender))

    def is_known(self, sender: str, message_id: str) -> bool:
        """Whether this message has come."""
        return message_id in self._by_sender[sender]

    def note(self, sender: str, message_id: str, sequence: int) -> bool:
        """It has come now, and has this number in the mailbox; durable with the next commit.

        Returns:
            Whether it is the first of its sender.
        """
        known = self._by_sender[sender]
        is_first = not known
        known[message_id] = sequence
        self._pending.put(layout.sent_key(sender, message_id), layout.encode_u64(sequence))
        while len(known) > SENT_MAX:
            oldest = next(iter(known))
            del known[oldest]
            self._pending.delete(layout.sent_key(sender, oldest))
        return is_first
