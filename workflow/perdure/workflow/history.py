"""A workflow's history in memory: names, entries, metadata, and the workflow's own fields.

1. Entries form a tree by location, as scopes nest; an operation finds its entry by one dictionary look-up in its scope's
   node. The rejected alternative, one map keyed by a joined path, made `a/b` and `a`, `b` the same entry.
2. Every change goes into `pending` as it is made, encoded; nothing here scans history to find what is dirty.
3. Names are numbered in order of first use and never renumbered; locations refer to the numbers.
4. Metadata and details are decoded when first asked for, user data only when an operation returns it.
5. `open_sleeps`, `open_retries` and `checkpoints` are kept up to date, so that a wake-up, or the question whether there is
   anything to roll back, costs what is open, not what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any, Final, cast

from perdure.storage import Driver, ValueCodecError, decode_value, encode_value, layout
from perdure.storage.attributes import Scalar, decode_attributes
from perdure.storage.driver import AlarmChange
from perdure.storage.errors import DecodeError
from perdure.storage.schema import (
    Entry,
    EntryKind,
    EntryMetadata,
    EntryStatus,
    Location,
    LoopIteration,
    RollbackCheckpointEntry,
    Segment,
    SleepEntry,
    SleepState,
    StepEntry,
    decode_entry,
    decode_metadata,
    encode_entry,
    encode_metadata,
)
from perdure.workflow.birth import NOTHING_SPECIAL, Birth
from perdure.workflow.calls import Calls
from perdure.workflow.details import decode_detail
from perdure.workflow.ids import is_ordered
from perdure.workflow.pending import Pending
from perdure.workflow.states import TERMINAL_STATES, WorkflowEvent, WorkflowState, next_state

__all__ = ["FORMAT_VERSION", "SEED_BYTES", "History", "Node", "Path", "order_of_creation", "order_of_location"]

FORMAT_VERSION: Final = 1
"""Version of Perdure's own keys; stored at `(32, 11)`, never reused."""

SEED_BYTES: Final = 16
"""Length of what a workflow's random values and keys derive from: with another, they would all be others."""

Path = tuple["str | int", ...]
"""A location as people read it: names, and numbers for loop iterations."""


def order_of_creation(entries: Iterable[Entry]) -> Callable[[Entry], tuple[Any, ...]]:
    """What to sort these entries by, to have them in the order in which they were recorded.

    Our ids tell it. The reference's are random, so where it recorded one of them the order is that of location, which is
    the order of creation as far as names were used in the order of their numbers.
    """
    if all(is_ordered(entry.id) for entry in entries):
        return lambda entry: (entry.id,)
    return lambda entry: order_of_location(entry.location)


def order_of_location(location: Location) -> tuple[tuple[int, ...], ...]:
    """A key that sorts locations: parents before children, names by number, iterations in order."""
    return tuple((segment,) if isinstance(segment, int) else tuple(segment) for segment in location)


class Node:
    """A place in the tree of locations: an entry, a scope, or both."""

    __slots__ = ("children", "entry")

    def __init__(self) -> None:
        self.children: dict[Segment, Node] = {}
        self.entry: Entry | None = None

    def walk(self) -> Iterator[Node]:
        """This node and all below it, without recursion."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _digest(error: bytes) -> bytes:
    return sha256(error).digest()[:8]


def _causes_of(error: bytes | None, stored: Any) -> list[str] | None:
    """The stored causes, if they are those of this error: the reference engine leaves them there when it stores another."""
    match stored:
        case {"error": bytes(digest), "entries": list()}:
            return list(stored["entries"]) if error is not None and digest == _digest(error) else None
        case _:
            raise DecodeError("the causes of the workflow's failure are not what their format says")


def _passable_of(stored: Any) -> list[tuple[str, str]]:
    """The stored ranges of what the code may pass over."""
    ranges: list[tuple[str, str]] = []
    for pair in cast("list[object]", stored) if isinstance(stored, list) else [stored]:
        match pair:
            case [str(after), str(until)]:
                ranges.append((after, until))
            case _:
                raise DecodeError("what the code may pass over is not stored as a list of pairs of entry ids")
    return ranges


def _merged(ranges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    merged: list[tuple[str, str]] = []
    for after, until in sorted(ranges):
        if merged and after <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((after, until))
    return merged


class History:
    """Everything a workflow's namespace holds except its mailbox.

    Attributes:
        root: The tree of entries.
        pending: What has changed since the last commit.
        state: The workflow's state, as it will be once `pending` is committed.
        input, output, error: The stored CBOR, or `None` where there is none.
        alarm_ms: When the workflow is to be woken.
        deadline_ms: When it fails unless it has ended, in milliseconds since the epoch; `None` for never.
        failure_causes: Ids of the entries that failed the workflow; `None` if that is not known, as when the reference
            engine ran it to its failure.
        idle_activations: How many activations in a row began work and recorded none.
        checkpoints: Where rollback checkpoints are recorded.
        completions: The last number given to a completed step that can be rolled back.
        passable: What the code may pass over since `recover()`: pairs of entry ids, after the first and up to the second.
        generation: How often it was replayed from a step.
        calls: The calls of other workflows that are open, those who wait for this one, and what it owes to them.
        is_frozen: Whether the code is only listened to, so that names it uses for the first time are not registered.
    """

    def __init__(self, workflow_id: str) -> None:
        self.workflow_id = workflow_id
        self.workflow_type: str | None = None
        self.pending: Pending = Pending()
        self.root: Node = Node()
        self.names: list[str] = []
        self.state: WorkflowState = WorkflowState.PENDING
        self.input: bytes | None = None
        self.output: bytes | None = None
        self.error: bytes | None = None
        self.alarm_ms: int | None = None
        self.deadline_ms: int | None = None
        self._attributes: dict[str, Scalar] = {}
        self.idle_activations: int = 0
        self.seed: bytes | None = None
        self.failure_causes: list[str] | None = None
        self.format_version: int = 0
        self.open_sleeps: dict[Location, Node] = {}
        self.open_retries: dict[str, Node] = {}
        self.checkpoints: set[Location] = set()
        self.completions: int = 0
        self.passable: list[tuple[str, str]] = []
        self.generation: int = 0
        self.calls: Calls = Calls(self.pending)
        self.is_frozen: bool = False
        self.last_entry_id: str = ""
        self._numbers: dict[str, int] = {}
        self._metadata: dict[str, EntryMetadata | bytes] = {}
        self._details: dict[str, dict[str, Any] | bytes] = {}
        self._loop_starts: dict[str, dict[int, bytes]] = {}

    @classmethod
    async def load(cls, workflow_id: str, driver: Driver) -> History:
        """Read a namespace. An empty one gives a pending workflow without history.

        Raises:
            DecodeError: A stored value is not what its format says.
            ValueCodecError: It cannot be decoded, or was written through a codec and none is given.
        """
        history = await cls.load_fields(workflow_id, driver)
        for key, value in await driver.list(layout.NAMES_PREFIX):
            history._load_name(layout.parse_name_key(key), value)
        for key, value in await driver.list(layout.METADATA_PREFIX):
            history._metadata[layout.parse_metadata_key(key)] = value
        for key, value in await driver.list(layout.DETAIL_PREFIX):
            history._details[layout.parse_detail_key(key)] = value
        for _key, value in await driver.list(layout.HISTORY_PREFIX):
            history._load_entry(decode_entry(value))
        if history._details or history.calls.duties:  # a call has a detail, and one whose entry is gone is a duty
            await history.calls.load(driver)
        if history.checkpoints:  # without any there are none of these
            for key, value in await driver.list(layout.LOOP_START_PREFIX):
                entry_id, iteration = layout.parse_loop_start_key(key)
                history._loop_starts.setdefault(entry_id, {})[iteration] = value
        return history

    @classmethod
    async def load_fields(cls, workflow_id: str, driver: Driver) -> History:
        """Read the workflow's own fields only, whatever the length of its history; enough to send it a message.

        Raises:
            DecodeError: A stored value is not what its format says.
            ValueCodecError: It cannot be decoded, or was written through a codec and none is given.
        """
        history = cls(workflow_id)
        fields = dict(await driver.list(layout.WORKFLOW_PREFIX))
        fields.update(await driver.list(layout.OWN_PREFIX))
        history._load_fields(fields)
        history.alarm_ms = await driver.get_alarm(workflow_id)
        return history

    def _load_name(self, index: int, value: bytes) -> None:
        if index != len(self.names):
            raise DecodeError(f"the name registry has a gap: found index {index} where {len(self.names)} was due")
        try:
            name = value.decode()
        except UnicodeDecodeError as error:
            raise DecodeError(f"name {index} of the registry is not UTF-8") from error
        self.names.append(name)
        self._numbers[name] = index

    def _load_entry(self, entry: Entry) -> None:
        node = self.root
        for segment in entry.location:
            following = node.children.get(segment)
            if following is None:
                number = segment if isinstance(segment, int) else segment.loop
                if number >= len(self.names):
                    raise DecodeError(f"entry {entry.id} is at name {number}, which the name registry does not have")
                following = node.children[segment] = Node()
            node = following
        node.entry = entry
        if entry.id > self.last_entry_id and is_ordered(entry.id):  # the reference's ids are random, and have no order
            self.last_entry_id = entry.id
        if type(entry.kind) is not StepEntry:
            self._track(node, entry.location, entry.kind)
        if entry.id in self._metadata:
            self._track_retry(node, entry.id, self._metadata[entry.id])

    def _load_fields(self, fields: Mapping[bytes, bytes]) -> None:
        if layout.CODEC_KEY in fields:  # a `CodedDriver` does not show it
            raise ValueCodecError(
                f"workflow {self.workflow_id!r} was written through a value codec, and is opened without one; pass it: "
                "open_supervisor(..., codec=codec), or CodedDriver(driver, codec, workflow_id)",
                workflow_id=self.workflow_id,
            )
        state = fields.get(layout.STATE_KEY, b"pending")
        try:
            self.state = WorkflowState(state.decode())
            type_name = fields.get(layout.WORKFLOW_TYPE_KEY)
            self.workflow_type = None if type_name is None else type_name.decode()
        except ValueError as error:
            raise DecodeError(f"{state!r} is not the name of a workflow state") from error
        self.input = fields.get(layout.INPUT_KEY)
        self.output = fields.get(layout.OUTPUT_KEY)
        self.error = fields.get(layout.ERROR_KEY)
        self.seed = fields.get(layout.SEED_KEY)
        if self.seed is not None and len(self.seed) != SEED_BYTES:
            raise DecodeError(f"the stored seed has {len(self.seed)} bytes, and not {SEED_BYTES}")
        if (count := fields.get(layout.IDLE_ACTIVATIONS_KEY)) is not None:
            self.idle_activations = layout.decode_u64(count)
        if (attributes := fields.get(layout.ATTRIBUTES_KEY)) is not None:
            self._attributes = decode_attributes(attributes)
        if (deadline := fields.get(layout.DEADLINE_KEY)) is not None:
            self.deadline_ms = layout.decode_u64(deadline)
        if (sequence := fields.get(layout.COMPLETION_SEQUENCE_KEY)) is not None:
            self.completions = layout.decode_u64(sequence)
        if (passable := fields.get(layout.PASSABLE_KEY)) is not None:
            self.passable = _passable_of(decode_value(passable))
        if (generation := fields.get(layout.GENERATION_KEY)) is not None:
            self.generation = layout.decode_u64(generation)
        self.calls.load_fields(fields)
        if (version := fields.get(layout.FORMAT_VERSION_KEY)) is not None:
            self.format_version = layout.decode_u64(version)
        if (causes := fields.get(layout.FAILURE_CAUSES_KEY)) is not None:
            self.failure_causes = _causes_of(self.error, decode_value(causes))

    # Names and places.

    def number_of(self, name: str) -> int:
        """The name's index, registering it on first use; -1, which is nobody's, for a new one while `is_frozen`."""
        number = self._numbers.get(name)
        if number is None:
            if self.is_frozen:
                return -1
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
            self.pending.put(layout.name_key(number), name.encode())
        return number

    def known_number(self, name: str) -> int | None:
        """The name's index if it was ever used; registers nothing."""
        return self._numbers.get(name)

    def path_of(self, location: Location) -> Path:
        """The location as people read it."""
        path: list[str | int] = []
        for segment in location:
            if isinstance(segment, LoopIteration):
                path.append(segment.iteration)
            else:
                path.append(self.names[segment] if segment < len(self.names) else f"?{segment}")
        return tuple(path)

    def node_at(self, location: Location) -> Node | None:
        """The node at a location, if there is one."""
        node: Node | None = self.root
        for segment in location:
            if node is None:
                break
            node = node.children.get(segment)
        return node

    # Entries.

    def put_entry(self, node: Node, entry: Entry, key: bytes | None = None) -> None:
        """Record an entry, new or changed, at its place; `key` is its key, where the caller has it already."""
        node.entry = entry
        self.pending.put(key or layout.entry_key(entry.location), encode_entry(entry))
        if type(entry.kind) is not StepEntry:
            self._track(node, entry.location, entry.kind)

    def change(self, node: Node, kind: EntryKind) -> None:
        """Record a new content of an entry that is there."""
        entry = node.entry
        assert entry is not None, "only a recorded entry changes"
        self.put_entry(node, Entry(entry.id, entry.location, kind))

    def touch(self, node: Node) -> None:
        """Record that an entry's content was changed in place, many times perhaps; it is encoded once for each batch."""
        entry = node.entry
        assert entry is not None, "only a recorded entry changes"
        self.pending.put_late(layout.entry_key(entry.location), lambda: encode_entry(entry))

    def _track(self, node: Node, location: Location, kind: EntryKind) -> None:
        if type(kind) is SleepEntry:
            if kind.state is SleepState.PENDING:
                self.open_sleeps[location] = node
            else:
                self.open_sleeps.pop(location, None)
        elif type(kind) is RollbackCheckpointEntry:
            self.checkpoints.add(location)

    def metadata(self, entry_id: str) -> EntryMetadata | None:
        """The entry's metadata, decoded; change it and hand it to `put_metadata`."""
        found = self._metadata.get(entry_id)
        if isinstance(found, bytes):
            found = self._metadata[entry_id] = decode_metadata(found)
        return found

    def put_metadata(self, node: Node, metadata: EntryMetadata) -> None:
        """Record metadata, new or changed."""
        entry = node.entry
        assert entry is not None, "metadata belongs to an entry"
        entry_id, status = entry.id, metadata.status
        data = encode_metadata(metadata)
        # What is complete hardly ever changes again. Its stored form is smaller, and no work for the garbage collector.
        self._metadata[entry_id] = data if status is EntryStatus.COMPLETED else metadata
        self.pending.put(layout.metadata_key(entry_id), data)
        if status is EntryStatus.FAILED or self.open_retries:
            self._track_retry(node, entry_id, metadata)

    def _track_retry(self, node: Node, entry_id: str, metadata: EntryMetadata | bytes) -> None:
        # Byte 2 of stored metadata is its status (after the u16 version); looking there avoids decoding all on load.
        try:
            status = metadata[2] if isinstance(metadata, bytes) else metadata.status
        except IndexError:
            raise DecodeError(f"the metadata of entry {entry_id} ends before its status") from None
        if status == EntryStatus.FAILED:
            self.open_retries[entry_id] = node
        elif self.open_retries:
            self.open_retries.pop(entry_id, None)

    def detail(self, entry_id: str) -> dict[str, Any]:
        """What is kept beyond the reference's fields; empty where nothing is."""
        found = self._details.get(entry_id)
        if found is None:
            return {}
        if isinstance(found, bytes):
            found = self._details[entry_id] = decode_detail(found, entry_id)
        return found

    def put_detail(self, entry_id: str, detail: dict[str, Any]) -> None:
        """Record what a replay needs beyond the reference's fields."""
        self._details[entry_id] = detail
        self.pending.put(layout.detail_key(entry_id), encode_value(detail))

    def touch_detail(self, entry_id: str, detail: dict[str, Any]) -> None:
        """`put_detail` for a map that is changed in place, many times perhaps: it is encoded once for each batch."""
        self._details[entry_id] = detail
        self.pending.put_late(layout.detail_key(entry_id), lambda: encode_value(detail))

    def delete_detail(self, entry_id: str) -> None:
        """Forget it."""
        if self._details.pop(entry_id, None) is not None:
            self.pending.delete(layout.detail_key(entry_id))

    def prune_iterations(self, node: Node, location: Location, first: int, end: int) -> None:
        """Forget a loop's iterations from `first` up to, not including, `end`, and all that belongs to them."""
        number = location[-1]
        assert isinstance(number, int), "a loop's location ends with its name"
        entry = node.entry
        assert entry is not None, "the loop is recorded"
        for iteration in range(first, end):
            below = node.children.pop(LoopIteration(number, iteration), None)
            if below is not None:
                self._forget(below)
            self._forget_loop_start(entry.id, iteration)
        self.pending.delete_range(*layout.loop_iterations_range(location, first, end))

    def forget_child(self, node: Node, location: Location, segment: Segment) -> None:
        """Forget all that is below one segment of a place, and all that belongs to it."""
        below = node.children.pop(segment, None)
        if below is not None:
            self._forget(below)
            self.pending.delete_prefix(layout.entry_key((*location, segment)))

    def forget(self, nodes: Iterable[Node]) -> None:
        """Forget single entries, and all that belongs to them; what is recorded below them is to be forgotten as well."""
        for node in nodes:
            entry = node.entry
            if entry is not None:
                node.entry = None
                self.pending.delete(layout.entry_key(entry.location))
                self._forget_entry(entry)

    def forget_all(self) -> None:
        """Forget every entry, and all that belongs to them."""
        for prefix in (
            layout.HISTORY_PREFIX,
            layout.METADATA_PREFIX,
            layout.DETAIL_PREFIX,
            layout.LOOP_START_PREFIX,
        ):
            self.pending.delete_prefix(prefix)
        self.root = Node()
        self.open_sleeps.clear()
        self.open_retries.clear()
        self.checkpoints.clear()
        self._loop_starts.clear()
        self._metadata.clear()
        self._details.clear()
        self.calls.give_up_all()

    def _forget(self, top: Node) -> None:
        for node in top.walk():
            if node.entry is not None:
                self._forget_entry(node.entry)

    def _forget_entry(self, entry: Entry) -> None:
        self.open_sleeps.pop(entry.location, None)
        self.open_retries.pop(entry.id, None)
        self.checkpoints.discard(entry.location)
        self.calls.give_up(entry.id)
        self.forget_loop_starts(entry.id, 0)
        if self._metadata.pop(entry.id, None) is not None:
            self.pending.delete(layout.metadata_key(entry.id))
        self.delete_detail(entry.id)

    def loop_start(self, entry_id: str, iteration: int) -> bytes | None:
        """The state that a retained iteration of a loop began with, if it was kept."""
        return self._loop_starts.get(entry_id, {}).get(iteration)

    def put_loop_start(self, entry_id: str, iteration: int, state: bytes) -> None:
        """Keep the state that an iteration began with for as long as the iteration is retained."""
        self._loop_starts.setdefault(entry_id, {})[iteration] = state
        self.pending.put(layout.loop_start_key(entry_id, iteration), state)

    def forget_loop_starts(self, entry_id: str, first: int) -> None:
        """Forget the states that the iterations from `first` on began with."""
        for iteration in list(self._loop_starts.get(entry_id, ())):
            if iteration >= first:
                self._forget_loop_start(entry_id, iteration)

    def _forget_loop_start(self, entry_id: str, iteration: int) -> None:
        if self._loop_starts.get(entry_id, {}).pop(iteration, None) is not None:
            self.pending.delete(layout.loop_start_key(entry_id, iteration))

    def holds_completions(self, top: Node) -> bool:
        """Whether a step that can be undone completed somewhere below."""
        return any(node.entry is not None and "completed" in self.detail(node.entry.id) for node in top.walk())

    def entries(self) -> Iterator[Entry]:
        """Every entry, parents before children."""
        for node in self.root.walk():
            if node.entry is not None:
                yield node.entry

    # The workflow's own fields.

    def apply(self, event: WorkflowEvent) -> None:
        """Change the state by the table."""
        state = next_state(self.state, event)
        if state is not self.state:
            had_ended, self.state = self.state in TERMINAL_STATES, state
            self.pending.put(layout.STATE_KEY, state.value.encode())
            if state in TERMINAL_STATES:
                self.calls.ended()
            elif state is WorkflowState.ROLLING_BACK:
                self.calls.give_up_all()
            elif had_ended:
                self.calls.went_on()

    def create(self, workflow_type: str, input_data: bytes, seed: bytes, birth: Birth = NOTHING_SPECIAL) -> None:
        """Begin a workflow: its identity, its input and its state."""
        self.input = input_data
        self.pending.put(layout.INPUT_KEY, input_data)
        self.adopt(workflow_type, seed)
        if birth.created_at_ms is not None:
            self.pending.put(layout.CREATED_AT_KEY, layout.encode_u64(birth.created_at_ms))
        if birth.attributes is not None:
            self.set_attributes(birth.attributes)
        if birth.parent is not None:
            self.calls.parent = birth.parent
            self.pending.put(layout.PARENT_KEY, birth.parent)
        if birth.deadline_ms is not None:
            self.set_deadline(birth.deadline_ms)
        if birth.start_at_ms is not None:
            starts = (birth.start_at_ms, birth.deadline_ms)
            self.set_alarm(min(time_ms for time_ms in starts if time_ms is not None))
        self.pending.put(layout.STATE_KEY, self.state.value.encode())

    def adopt(self, workflow_type: str, seed: bytes) -> None:
        """Add our own fields where they are missing (a new workflow, or one that the reference engine began)."""
        if self.workflow_type is None:
            self.workflow_type = workflow_type
            self.pending.put(layout.WORKFLOW_ID_KEY, self.workflow_id.encode())
            self.pending.put(layout.WORKFLOW_TYPE_KEY, workflow_type.encode())
        if self.seed is None:
            self.seed = seed
            self.pending.put(layout.SEED_KEY, seed)
        if self.format_version == 0:
            self.format_version = FORMAT_VERSION
            self.pending.put(layout.FORMAT_VERSION_KEY, layout.encode_u64(FORMAT_VERSION))

    def set_output(self, data: bytes | None) -> None:
        """Record the result; `None` stores none."""
        self.output = data
        if data is not None:
            self.pending.put(layout.OUTPUT_KEY, data)

    def clear_output(self) -> None:
        """Forget the result."""
        self.output = None
        self.pending.delete(layout.OUTPUT_KEY)

    def set_error(self, data: bytes, causes: list[str] | None) -> None:
        """Record the error and the entries that caused it; `None` leaves open which."""
        self.error = data
        self.failure_causes = causes
        self.pending.put(layout.ERROR_KEY, data)
        if causes is not None:
            stored = {"error": _digest(data), "entries": causes}
            self.pending.put(layout.FAILURE_CAUSES_KEY, encode_value(stored))

    def clear_error(self) -> None:
        """Forget the error and its causes."""
        self.error = None
        self.failure_causes = None
        self.pending.delete(layout.ERROR_KEY)
        self.pending.delete(layout.FAILURE_CAUSES_KEY)

    def let_pass(self, after: str, until: str) -> None:
        """From now on the code may pass over what was recorded after one entry, up to another.

        "" is before all others; after it is also what another engine recorded, whose ids have no order.
        """
        self.passable = _merged([*self.passable, (after, until)])
        self.pending.put(layout.PASSABLE_KEY, encode_value([list(pair) for pair in self.passable]))

    def may_be_passed(self, node: Node) -> bool:
        """Whether the code may leave out what is recorded at a place."""
        if node.entry is not None:
            return self._is_passable(node.entry.id)
        return all(below.entry is None or self._is_passable(below.entry.id) for below in node.walk())

    def _is_passable(self, entry_id: str) -> bool:
        if is_ordered(entry_id):
            return any(after < entry_id <= until for after, until in self.passable)
        return any(not after for after, _ in self.passable)  # another engine's: when it was recorded is not known

    def begin_generation(self) -> None:
        """The workflow is replayed from a step: what it sends and calls from now on is something new."""
        self.generation += 1
        self.pending.put(layout.GENERATION_KEY, layout.encode_u64(self.generation))

    def next_completion(self) -> int:
        """The next number of the order in which steps completed; recorded."""
        self.completions += 1
        self.pending.put(layout.COMPLETION_SEQUENCE_KEY, layout.encode_u64(self.completions))
        return self.completions

    def set_alarm(self, wake_at_ms: int | None) -> None:
        """Arm or clear the alarm, if that is a change."""
        if wake_at_ms != self.alarm_ms:
            self.alarm_ms = wake_at_ms
            self.pending.set_alarm(AlarmChange(self.workflow_id, wake_at_ms))

    def attributes(self) -> dict[str, Scalar]:
        """By what the workflow can be found; a new dictionary."""
        return dict(self._attributes)

    def set_attributes(self, data: bytes) -> None:
        """Record by what the workflow can be found, as CBOR."""
        self._attributes = decode_attributes(data)
        if self._attributes:
            self.pending.put(layout.ATTRIBUTES_KEY, data)
        else:
            self.pending.delete(layout.ATTRIBUTES_KEY)

    def set_deadline(self, deadline_ms: int | None) -> None:
        """Record when the workflow fails unless it has ended; `None` for never."""
        self.deadline_ms = deadline_ms
        if deadline_ms is None:
            self.pending.delete(layout.DEADLINE_KEY)
        else:
            self.pending.put(layout.DEADLINE_KEY, layout.encode_u64(deadline_ms))

    def set_idle_activations(self, count: int) -> None:
        """Record the count of activations without progress; 0 removes it."""
        if count == self.idle_activations:
            return
        self.idle_activations = count
        if count:
            self.pending.put(layout.IDLE_ACTIVATIONS_KEY, layout.encode_u64(count))
        else:
            self.pending.delete(layout.IDLE_ACTIVATIONS_KEY)
