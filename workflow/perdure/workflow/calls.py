"""Who calls whom, as a workflow's namespace says it: the calls that it made and that are open, and who waits for its own end.

1. A call is *open* from before its child exists until its outcome is recorded in its entry; one batch ends the one and writes
   the other. What came of the child is put here first, by whoever tells (`children.receive`), so it is there for a caller
   that is not in memory, or whose child is deleted meanwhile.
2. A call that nobody waits for any more is *abandoned* if its child is to be cancelled, else forgotten: its branch lost a
   race, it was rewound, or the workflow ended or is rolled back. An open entry without an open call is called anew.
3. A workflow that ends owes to its callers to tell them, and to its abandoned children to cancel them. These duties are
   written in the batch that brings them about, and removed in one once they are done; as long as there are any, the
   catalog says that the workflow is due (`perdure.storage.wake`). So a crash in between is made good at the next start.
4. Nobody but the workflow's activation writes here. What is asked of other workflows is done by the host (`host.py`), which
   holds no two of them at once.

Rejected: to let the caller ask, again and again or by an alarm. A thousand children would cost a thousand questions for each
end, and a caller that sleeps for a year would have to be brought in to do it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Literal, TypeAlias, cast

from perdure.storage import Driver, decode_value, encode_value, layout
from perdure.storage.errors import DecodeError
from perdure.storage.rebuild import parent_id_of
from perdure.workflow.pending import Pending

__all__ = ["Calls", "ChildOutcome", "Duty", "OpenCall", "OnParentEnd", "parent_reference"]

OnParentEnd: TypeAlias = Literal["cancel", "leave"]
"""What becomes of a child once nobody waits for it: it is cancelled, or it goes on."""

Duty: TypeAlias = Literal["tell", "cancel"]
"""What a workflow owes: to tell its callers how it ended, or to cancel what it called."""

_DUTIES: Final[tuple[Duty, ...]] = ("tell", "cancel")
_TELL: Final[frozenset[Duty]] = frozenset({"tell"})
_CANCEL: Final[frozenset[Duty]] = frozenset({"cancel"})


def parent_reference(workflow_id: str, seed: bytes | None) -> bytes:
    """How a child knows its parent: by its id, and by a digest of its seed, since an id may be used again."""
    return encode_value({"id": workflow_id, "seed": sha256(seed or b"").digest()[:8]})


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    """How a child ended.

    Attributes:
        state: `completed`, `failed` or `cancelled`.
        output: The CBOR of what it returned, if that is something.
        error: The CBOR map of what it failed with.
    """

    state: str
    output: bytes | None = None
    error: bytes | None = None

    def encode(self) -> bytes:
        """The stored form."""
        return encode_value({"state": self.state, "output": self.output, "error": self.error})

    @classmethod
    def decode(cls, data: bytes) -> ChildOutcome:
        """The inverse.

        Raises:
            DecodeError: It is nothing of the kind.
        """
        match decode_value(data):
            case {"state": str(state), "output": bytes() | None as output, "error": bytes() | None as error}:
                return cls(state, output, error)
            case _:
                raise DecodeError("what is stored as the outcome of a call is none")


@dataclass(slots=True)
class OpenCall:
    """A call that has no outcome in history.

    Attributes:
        entry_id: The id of its entry.
        child_id: Whom it calls.
        policy: What becomes of the child once nobody waits for it.
        is_given: Whether the child's id was given, not derived.
        is_raced: Whether the wait is in a branch of a race, and may so end without the child.
        is_again: Whether the call was given up before, or reset, and is made again.
        is_spawned: Whether it is known that the child exists and will tell.
        is_abandoned: Whether nobody waits any more, and the child is to be cancelled.
        outcome: What came of the child, once that is known.
    """

    entry_id: str
    child_id: str
    policy: OnParentEnd
    is_given: bool = False
    is_raced: bool = False
    is_again: bool = False
    is_spawned: bool = False
    is_abandoned: bool = False
    outcome: ChildOutcome | None = None

    def encode(self) -> bytes:
        """The stored form, but for the outcome."""
        stored: dict[str, Any] = {"child": self.child_id, "on_parent_end": self.policy}
        flags = {
            "given": self.is_given,
            "raced": self.is_raced,
            "again": self.is_again,
            "spawned": self.is_spawned,
            "abandoned": self.is_abandoned,
        }
        return encode_value(stored | {name: True for name, is_set in flags.items() if is_set})

    @classmethod
    def decode(cls, entry_id: str, data: bytes) -> OpenCall:
        """The inverse.

        Raises:
            DecodeError: It is nothing of the kind.
        """
        match decode_value(data):
            case {"child": str(child_id), "on_parent_end": "cancel" | "leave" as policy, **flags}:
                given, raced, again, spawned, abandoned = (
                    flags.get(name) is True for name in ("given", "raced", "again", "spawned", "abandoned")
                )
                return cls(entry_id, child_id, policy, given, raced, again, spawned, abandoned)
            case _:
                raise DecodeError(f"what is stored as the open call of entry {entry_id} is none")


class Calls:
    """The open and abandoned calls of one workflow, its callers, and its duties.

    Attributes:
        parent: The reference of the workflow that made this one by a call, or `None`.
        joiners: The ids of the workflows that wait for this one besides.
        duties: What it owes to others.
        abandoned: The calls whose children are to be cancelled, by entry id.
    """

    def __init__(self, pending: Pending) -> None:
        self.parent: bytes | None = None
        self.joiners: list[str] = []
        self.duties: frozenset[Duty] = frozenset()
        self.abandoned: dict[str, OpenCall] = {}
        self._pending = pending
        self._open: dict[str, OpenCall] = {}
        self._by_child: dict[str, dict[str, OpenCall]] = {}

    # Loading.

    def load_fields(self, fields: Mapping[bytes, bytes]) -> None:
        """Take what is said beside the calls themselves.

        Raises:
            DecodeError: It is not what its format says.
        """
        self.parent = fields.get(layout.PARENT_KEY)
        if self.parent is not None:
            parent_id_of(self.parent)  # what is damaged is found now, and not once there is something to tell
        if (joiners := fields.get(layout.JOINERS_KEY)) is not None:
            self.joiners = _texts(joiners, "the workflows that wait for this one")
        if (duties := fields.get(layout.DUTIES_KEY)) is not None:
            found = _texts(duties, "what a workflow owes")
            self.duties = frozenset(duty for duty in _DUTIES if duty in found)

    async def load(self, driver: Driver) -> None:
        """Read the calls.

        Raises:
            DecodeError: One is not what its format says.
        """
        outcomes: dict[str, ChildOutcome] = {}
        for key, value in await driver.list(layout.CALLS_PREFIX):
            entry_id, is_outcome = layout.parse_call_key(key)
            if is_outcome:
                outcomes[entry_id] = ChildOutcome.decode(value)
            else:
                self._add(OpenCall.decode(entry_id, value))
        for entry_id, outcome in outcomes.items():
            if (call := self._open.get(entry_id)) is not None:
                call.outcome = outcome

    def _add(self, call: OpenCall) -> None:
        if call.is_abandoned:
            self.abandoned[call.entry_id] = call
        else:
            self._open[call.entry_id] = call
            self._by_child.setdefault(call.child_id, {})[call.entry_id] = call

    def _take_out(self, call: OpenCall) -> None:
        del self._open[call.entry_id]
        of_child = self._by_child[call.child_id]
        del of_child[call.entry_id]
        if not of_child:
            del self._by_child[call.child_id]

    # Looking.

    def get(self, entry_id: str) -> OpenCall | None:
        """The open call of an entry."""
        return self._open.get(entry_id)

    def of_child(self, child_id: str) -> Collection[OpenCall]:
        """The open calls that wait for this workflow."""
        return self._by_child.get(child_id, {}).values()

    def required(self, ignored: Container[str] = ()) -> list[str]:
        """The ids of the workflows without whose end this one cannot go on to its own, each once.

        Args:
            ignored: The entry ids of calls that do not count.
        """
        waiting = (call for call in self._open.values() if not call.is_raced and call.outcome is None)
        return list(dict.fromkeys(call.child_id for call in waiting if call.entry_id not in ignored))

    @property
    def parent_id(self) -> str | None:
        """The id of the workflow that made this one by a call."""
        return None if self.parent is None else parent_id_of(self.parent)

    def callers(self) -> list[str]:
        """Whom to tell how this workflow ended, each once."""
        parent_id = self.parent_id
        return list(dict.fromkeys([*(() if parent_id is None else (parent_id,)), *self.joiners]))

    # Changing; durable with the next commit.

    def open(self, call: OpenCall) -> OpenCall:
        """A call is made, or something more is known of it."""
        if call.entry_id not in self._open:
            self.cancelled([call])  # if it was abandoned, it is so no more
            self._add(call)
        self._pending.put(layout.call_key(call.entry_id), call.encode())
        return call

    def end(self, call: OpenCall, outcome: ChildOutcome) -> None:
        """The child of an open call has ended."""
        call.outcome = outcome
        self._pending.put(layout.outcome_key(call.entry_id), outcome.encode())

    def close(self, entry_id: str) -> None:
        """The call's entry says what came of it, or nobody is to know."""
        call = self._open.get(entry_id)
        if call is not None:
            self._take_out(call)
            self._delete(call)

    def _delete(self, call: OpenCall) -> None:
        self._pending.delete(layout.call_key(call.entry_id))
        if call.outcome is not None:
            self._pending.delete(layout.outcome_key(call.entry_id))

    def give_up(self, entry_id: str) -> None:
        """Nobody waits for the call of this entry any more, if it had one."""
        call = self._open.get(entry_id)
        if call is None:
            return
        self.close(entry_id)
        if call.policy == "cancel" and call.outcome is None:
            call.is_abandoned = True
            self.abandoned[entry_id] = call
            self._pending.put(layout.call_key(entry_id), call.encode())
            self._set_duties(self.duties | _CANCEL)

    def give_up_all(self) -> None:
        """Nobody waits for any of the calls any more."""
        for entry_id in list(self._open):
            self.give_up(entry_id)

    def leave_given(self, known: Collection[str]) -> None:
        """Let those go on that were abandoned, are not among the known ones, and have ids by which they are called again."""
        self.cancelled([call for call in self.abandoned.values() if call.is_given and call.entry_id not in known])

    def join(self, workflow_id: str) -> None:
        """Another workflow waits for this one's end."""
        if workflow_id not in self.joiners:
            self.joiners.append(workflow_id)
            self._pending.put(layout.JOINERS_KEY, encode_value(self.joiners))

    def ended(self) -> None:
        """The workflow has ended: its callers are to be told, and its children given up."""
        self.give_up_all()
        if self.parent is not None or self.joiners:
            self._set_duties(self.duties | _TELL)

    def went_on(self) -> None:
        """The workflow runs again: there is no end to be told."""
        self._set_duties(self.duties - _TELL)

    def told(self) -> None:
        """Every caller knows."""
        if self.joiners:
            self.joiners = []
            self._pending.delete(layout.JOINERS_KEY)
        self._set_duties(self.duties - _TELL)

    def cancelled(self, calls: Sequence[OpenCall]) -> None:
        """These children need not be cancelled any more."""
        for call in calls:
            if (known := self.abandoned.pop(call.entry_id, None)) is not None:
                self._delete(known)
        if not self.abandoned:
            self._set_duties(self.duties - _CANCEL)

    def _set_duties(self, duties: frozenset[Duty]) -> None:
        if duties == self.duties:
            return
        self.duties = duties
        if duties:
            self._pending.put(layout.DUTIES_KEY, encode_value([duty for duty in _DUTIES if duty in duties]))
        else:
            self._pending.delete(layout.DUTIES_KEY)


def _texts(data: bytes, what: str) -> list[str]:
    stored: Any = decode_value(data)
    if not isinstance(stored, list) or not all(isinstance(text, str) for text in cast("list[object]", stored)):
        raise DecodeError(f"{what} is not stored as a list of texts")
    return cast("list[str]", stored)
