"""The mailbox of one workflow: messages that are durable and not yet consumed.

1. It lives in the workflow's own namespace, so taking a message and recording it is one batch.
2. Order is by sequence number; a read takes the oldest message that it may, so each sender's messages keep their order.
3. A message is offered to readers only once it is durable.
4. An `id=` given by the sender is remembered (the last `DEDUP_MAX` of them), so that sending it again delivers nothing.
5. A message that is given back returns to the number it had. One whose number is not known goes before everything else, at
   a number below 0: whatever was read is older than what of its name still waits. Messages whose numbers are not known are
   given back latest read first. The rejected alternative, to renumber what waits, would rewrite the whole mailbox, and take
   numbers that messages which are out, in a branch of a race, may still return to.
6. A message takes up room from the moment at which it gets its place until it is durable that it was read: what is on its
   way counts, and a run that comes to nothing leaves no more behind than the limit allows. What is given back was inside
   before, and goes back whether there is room or not.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

from perdure.storage import Driver, layout
from perdure.storage.schema import MailboxMessage, decode_message, encode_message
from perdure.workflow.pending import Pending

__all__ = ["DEDUP_MAX", "MAILBOX_LIMIT", "Letter", "Mailbox"]

DEDUP_MAX: Final = 1000
"""How many of the senders' message ids a workflow remembers."""

MAILBOX_LIMIT: Final = 1000
"""How many messages a mailbox holds at most, unless another limit is set."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message and its place in the mailbox: the lower the number, the earlier it is read."""

    sequence: int
    message: MailboxMessage


class Mailbox:
    """What waits to be read, by name, oldest first.

    Attributes:
        size: How many messages take up room: those that wait, those on their way in, and those read, until that is durable.
    """

    def __init__(self, pending: Pending) -> None:
        self.size: int = 0
        self._pending = pending
        self._by_name: dict[str, deque[Letter]] = {}
        self._count = 0
        self._next_sequence = 0
        self._in_front: set[int] = set()  # the numbers below 0 that are taken
        self._known_ids: dict[str, int] | None = None

    @classmethod
    async def load(cls, driver: Driver, pending: Pending) -> Mailbox:
        """Read the mailbox of a namespace."""
        mailbox = cls(pending)
        for key, value in await driver.list(layout.MAILBOX_PREFIX):
            sequence = layout.parse_message_key(key)
            mailbox.offer(Letter(sequence, decode_message(value)))
            if sequence < 0:
                mailbox._in_front.add(sequence)
            else:
                mailbox._next_sequence = sequence + 1
        mailbox.size = len(mailbox)
        await mailbox._load_sequence(driver)
        return mailbox

    @classmethod
    async def load_end(cls, driver: Driver, pending: Pending, *, limit: int) -> Mailbox:
        """Read only where the next message goes, and whether there is room for it; enough to send one."""
        mailbox = cls(pending)
        await mailbox._load_sequence(driver)
        if mailbox._next_sequence >= limit:  # fewer than that were ever sent, otherwise
            mailbox.size = len(await driver.list(layout.MAILBOX_PREFIX))
        return mailbox

    async def _load_sequence(self, driver: Driver) -> None:
        stored = await driver.get(layout.MAILBOX_SEQUENCE_KEY)
        if stored is not None:
            self._next_sequence = max(self._next_sequence, layout.decode_u64(stored))

    def __len__(self) -> int:
        """How many messages wait."""
        return self._count

    def count_of(self, name: str) -> int:
        """How many messages of this name wait."""
        return len(self._by_name.get(name, ()))

    def names(self) -> Iterable[str]:
        """The names of the messages that wait."""
        return self._by_name.keys()

    @property
    def has_known_ids(self) -> bool:
        """Whether the senders' ids were read."""
        return self._known_ids is not None

    async def load_known_ids(self, driver: Driver) -> None:
        """Read the senders' ids, once; `is_known` and `write` need them when a message has one."""
        if self._known_ids is None:
            pairs = await driver.list(layout.DEDUP_PREFIX)
            found = [(layout.decode_u64(value), layout.parse_dedup_key(key)) for key, value in pairs]
            if self._known_ids is None:  # not read by another sender meanwhile
                self._known_ids = {message_id: sequence for sequence, message_id in sorted(found)}

    def is_known(self, message_id: str) -> bool:
        """Whether a message with this id was sent before (among the last `DEDUP_MAX`)."""
        assert self._known_ids is not None, "load_known_ids comes first"
        return message_id in self._known_ids

    def write(self, message: MailboxMessage, *, remember: bool) -> Letter:
        """Give a message its place; it is durable with the next commit, and is then to be offered."""
        letter = Letter(self._next_sequence, message)
        self._next_sequence += 1
        self.size += 1
        self._pending.put(layout.message_key(letter.sequence), encode_message(message))
        self._pending.put(layout.MAILBOX_SEQUENCE_KEY, layout.encode_u64(self._next_sequence))
        if remember:
            assert self._known_ids is not None, "load_known_ids comes first"
            self._known_ids[message.id] = letter.sequence
            self._pending.put(layout.dedup_key(message.id), layout.encode_u64(letter.sequence))
            while len(self._known_ids) > DEDUP_MAX:
                oldest = next(iter(self._known_ids))
                del self._known_ids[oldest]
                self._pending.delete(layout.dedup_key(oldest))
        return letter

    def drop(self, message_ids: Container[str]) -> None:
        """Take out the messages with these ids, wherever they are; durable with the next commit."""
        for name, queue in list(self._by_name.items()):
            kept = deque(letter for letter in queue if letter.message.id not in message_ids)
            for letter in queue:
                if letter.message.id in message_ids:
                    self._remove(letter)
            self._count -= len(queue) - len(kept)
            self.size -= len(queue) - len(kept)
            if kept:
                self._by_name[name] = kept
            else:
                del self._by_name[name]

    def put_back(self, message: MailboxMessage, sequence: int | None) -> Letter:
        """Return a message that was read to its place; it is durable with the next commit, and is then to be offered.

        Args:
            message: What was read. Its id stays remembered.
            sequence: The number that it had, or `None` where that is not known. Without a number, or if it is a number below
                0 that another has now, the message goes before everything else; so of several messages the one that was
                read last is to be given back first.
        """
        if sequence is None or sequence in self._in_front:
            sequence = self.place_in_front()
        elif sequence < 0:
            self._in_front.add(sequence)
        letter = Letter(sequence, message)
        self.size += 1
        self._pending.put_returned(layout.message_key(sequence), encode_message(message))
        return letter

    def place_in_front(self) -> int:
        """A free number before everything else in the mailbox; it is taken from then on."""
        sequence = min(self._in_front, default=0) - 1
        self._in_front.add(sequence)
        return sequence

    def offer(self, letter: Letter) -> None:
        """Let readers see a durable message, at its place among those of its name."""
        queue = self._by_name.setdefault(letter.message.name, deque())
        if not queue or letter.sequence > queue[-1].sequence:  # the usual case
            queue.append(letter)
        elif letter.sequence < queue[0].sequence:
            queue.appendleft(letter)
        else:
            queue.insert(bisect_left(queue, letter.sequence, key=lambda waiting: waiting.sequence), letter)
        self._count += 1

    def take(self, names: Iterable[str] | None, count: int) -> list[Letter]:
        """Take up to `count` of the oldest messages of these names (`None`: of any) out of the mailbox.

        Their removal is durable with the next commit; until `make_room` is told of it, they take up room.
        """
        taken: list[Letter] = []
        wanted = self._by_name.keys() if names is None else names
        heads = [(queue[0].sequence, name) for name in wanted if (queue := self._by_name.get(name))]
        heapq.heapify(heads)
        while heads and len(taken) < count:
            _, name = heads[0]
            queue = self._by_name[name]
            letter = queue.popleft()
            taken.append(letter)
            self._count -= 1
            self._remove(letter)
            if queue:
                heapq.heapreplace(heads, (queue[0].sequence, name))
            else:
                del self._by_name[name]
                heapq.heappop(heads)
        return taken

    def waiting(self) -> list[Letter]:
        """What waits, oldest first."""
        letters = [letter for queue in self._by_name.values() for letter in queue]
        return sorted(letters, key=lambda letter: letter.sequence)

    def make_room(self, count: int) -> None:
        """The removal of so many messages that were taken is durable."""
        self.size -= count

    def _remove(self, letter: Letter) -> None:
        self._in_front.discard(letter.sequence)
        self._pending.delete(layout.message_key(letter.sequence))
