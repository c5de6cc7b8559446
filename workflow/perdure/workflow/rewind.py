"""`replay_from_step`: forget a step and everything later, so that the workflow runs on from before it.

1. Later is what was recorded later, wherever it is: in branches beside the step as well, which then run on from the same
   moment. What was recorded before the step stays as it is, also where it ended after it.
2. A message that a forgotten read had taken goes back into the mailbox, before all that waits there, unless it was completed.
3. What encloses something forgotten stays and is open again: a branch is running, a race has no winner and begins anew (the
   histories of its losers are gone), a loop is in the iteration of which something was forgotten, with the state that this
   iteration began with.
4. Nothing is replayed over something that is not so: a step that may be running, or whose effect was rolled back.
5. What is to be forgotten is decided first, on plain data, and refused as a whole or done in one batch. Where a driver cuts
   batches, the step itself goes last, with the state: until then the same call can be made again.

The rejected alternative, the reference engine's, forgets the innermost loop as a whole and runs its finished iterations again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from perdure.storage import Driver, layout
from perdure.storage.schema import (
    KIND_NAMES,
    BranchStatus,
    Entry,
    EntryKind,
    EntryMetadata,
    EntryStatus,
    JoinEntry,
    Location,
    LoopEntry,
    LoopIteration,
    RaceEntry,
    Segment,
    SleepEntry,
    SleepState,
    StepEntry,
)
from perdure.workflow.activation import Activation
from perdure.workflow.checks import check_driver
from perdure.workflow.clock import Clock
from perdure.workflow.deadline import lift_if_passed
from perdure.workflow.errors import InvalidArgumentError, RewindError
from perdure.workflow.history import History, Node, Path, order_of_creation
from perdure.workflow.mailbox import Mailbox
from perdure.workflow.post import check_clock, turn_of
from perdure.workflow.reads import finished_reads, held_messages
from perdure.workflow.recover import reopened_branches
from perdure.workflow.scope import is_of_queue_read
from perdure.workflow.snapshot import snapshot_of
from perdure.workflow.states import WorkflowEvent
from perdure.workflow.types import WorkflowSnapshot

__all__ = ["replay_from_step"]


async def replay_from_step(
    driver: Driver, entry_id: str | None = None, *, clock: Clock | None = None
) -> WorkflowSnapshot:
    """Forget a step and all that was recorded after it, and make the workflow runnable again, in whatever state it is.

    Nothing is run. The workflow is `pending` afterwards, its alarm armed for now, output and error gone; its next run goes
    through what is left of its history and runs the step again. Steps have the same idempotency keys as before, so what
    honours them may answer with the old result. Messages that forgotten reads had taken are in the mailbox again, unless
    they were completed. A version that was decided after the step is decided anew. In a loop, the step must be in the
    iteration in progress (or the last one), or in an earlier one whose starting state was kept for a rollback.

    Durable on return. Not interrupted by cancellation once it has begun to write. With a driver that is not atomic, what is
    written may be cut by a crash: call it again with the same id.

    Args:
        driver: The workflow's namespace; nothing may be running the workflow meanwhile.
        entry_id: The id of the step's history entry, as in `load_snapshot(driver).entries`; `None` forgets all history. The
            input stays in any case.
        clock: Where the time of the alarm comes from; the system's clock unless given.

    Returns:
        The workflow as it is stored now.

    Raises:
        RewindError: It cannot be replayed from there; nothing was changed.
        InvalidArgumentError: An argument is not what it must be.
        StorageError: What is stored has to be read again.
    """
    check_driver(driver)
    check_clock(clock)
    _check_entry_id(entry_id)
    async with turn_of(driver):
        workflow_id = (await driver.get(layout.WORKFLOW_ID_KEY) or b"").decode(errors="replace")
        activation = await Activation.load(workflow_id, driver, clock=clock)
        if activation.is_new:
            raise RewindError("no workflow was ever started in this namespace", entry_id=entry_id, found=None)
        history = activation.history
        rewind = _Rewind(history, entry_id, order_of_creation(history.entries()))
        rewind.decide()
        rewind.give_back(activation.mailbox)
        rewind.reopen()
        abandoned = set(history.calls.abandoned)
        history.begin_generation()
        if rewind.target is None:
            history.forget_all()
        else:
            history.forget(node for node in rewind.forgotten.values() if node is not rewind.target)
            if not driver.atomic_batch:
                await activation.commit_from_outside()
            history.forget([rewind.target])
        history.calls.leave_given(abandoned)
        history.clear_output()
        history.clear_error()
        history.set_idle_activations(0)
        lift_if_passed(history, activation.clock.now_ms())
        history.apply(WorkflowEvent.REWIND)
        history.set_alarm(activation.clock.now_ms())
        await activation.commit_from_outside()
        return snapshot_of(history)


def _check_entry_id(entry_id: object) -> None:
    if entry_id is not None and not isinstance(entry_id, str):
        raise InvalidArgumentError(
            f"entry_id must be the id of a history entry, as text, not {type(entry_id).__name__}; "
            "load_snapshot(driver).entries has the ids"
        )


def _text(path: Path) -> str:
    return " > ".join(repr(part) if isinstance(part, str) else f"#{part}" for part in path)


@dataclass(slots=True)
class _Rewind:
    """What a replay from a step forgets and reopens.

    Attributes:
        history: Of what.
        entry_id: The id that was asked for.
        order: What sorts entries in the order in which they were recorded.
        target: Where that step is; `None` if all is to be forgotten.
        forgotten: What goes, by entry id.
        changes: What stays and changes.
        below: Where something goes: the segments below each place that lead to it.
    """

    history: History
    entry_id: str | None
    order: Callable[[Entry], tuple[Any, ...]]
    target: Node | None = None
    forgotten: dict[str, Node] = field(default_factory=dict[str, Node])
    changes: list[tuple[Node, EntryKind]] = field(default_factory=list[tuple[Node, EntryKind]])
    below: dict[Location, set[Segment]] = field(default_factory=dict[Location, set[Segment]])

    # Deciding; nothing is changed.

    def decide(self) -> None:
        """Find what is to go and what to change.

        Raises:
            RewindError: It is not possible.
        """
        recorded = [(node, node.entry) for node in self.history.root.walk() if node.entry is not None]
        self._check_nothing_runs(recorded)
        if self.entry_id is None:
            self.forgotten = {entry.id: node for node, entry in recorded}
            return
        target = self._find_target(recorded)
        first = self.order(target)
        self.target = self.history.node_at(target.location)
        self.forgotten = {entry.id: node for node, entry in recorded if self.order(entry) >= first}
        self._take_reads_whole()
        self._check_nothing_is_undone(recorded)
        for node in self.forgotten.values():
            assert node.entry is not None, "what is forgotten is recorded"
            location = node.entry.location
            for depth in range(len(location)):
                self.below.setdefault(location[:depth], set()).add(location[depth])
        for place, segments in self.below.items():
            above = self.history.node_at(place)
            if above is None or above.entry is None or above.entry.id in self.forgotten:
                continue
            match above.entry.kind:
                case JoinEntry() | RaceEntry() as kind:
                    self._reopen_branches(above, kind, segments)
                case LoopEntry() as kind:
                    self._reopen_loop(above, above.entry, kind, segments)
                case _:
                    continue

    def _error(self, message: str, found: str | None) -> RewindError:
        return RewindError(message, entry_id=self.entry_id, found=found)

    def _path_text(self, entry: Entry) -> str:
        return _text(self.history.path_of(entry.location))

    def _find_target(self, recorded: list[tuple[Node, Entry]]) -> Entry:
        target = next((entry for _, entry in recorded if entry.id == self.entry_id), None)
        if target is None:
            raise self._error(
                f"history holds no entry with the id {self.entry_id!r}; load_snapshot(driver).entries lists the ids",
                None,
            )
        if not isinstance(target.kind, StepEntry):
            kind = KIND_NAMES[type(target.kind)]
            first = self.order(target)
            steps = [(self.order(entry), entry) for _, entry in recorded if isinstance(entry.kind, StepEntry)]
            _, step = min(((order, entry) for order, entry in steps if order > first), default=(None, None))
            hint = "" if step is None else f"; the first step after it is {self._path_text(step)}, {step.id!r}"
            raise self._error(
                f"entry {self.entry_id!r} is a {kind} ({self._path_text(target)}), and a workflow is replayed from a step{hint}",
                kind,
            )
        return target

    def _check_nothing_runs(self, recorded: list[tuple[Node, Entry]]) -> None:
        for _, entry in recorded:
            metadata = self._step_metadata(entry)
            if metadata is not None and metadata.status is EntryStatus.RUNNING:
                raise self._error(
                    f"step {self._path_text(entry)} is running, or its process ended while it was, so its effect is not "
                    "known; run the workflow until the step has an outcome, and then replay it",
                    "a running step",
                )

    def _check_nothing_is_undone(self, recorded: list[tuple[Node, Entry]]) -> None:
        undone = [
            entry
            for _, entry in recorded
            if (metadata := self._step_metadata(entry)) is not None and metadata.rollback_completed_at_ms is not None
        ]
        if all(entry.id in self.forgotten for entry in undone):
            return
        first = min(undone, key=self.order)
        raise self._error(
            f"step {self._path_text(first)} was rolled back, so the workflow cannot go on as if it were done; replay from "
            f"that step ({first.id!r}) or an earlier one, or use recover()",
            "a step that was rolled back",
        )

    def _step_metadata(self, entry: Entry) -> EntryMetadata | None:
        return self.history.metadata(entry.id) if isinstance(entry.kind, StepEntry) else None

    def _take_reads_whole(self) -> None:
        """A queue read of which anything goes is to be done again, until the time that it was given."""
        for scope in self.history.root.walk():
            for count, messages in finished_reads(self.history, scope):
                parts = [(node, node.entry) for node in (count, *messages) if node.entry is not None]
                if not any(entry.id in self.forgotten for _, entry in parts):
                    continue
                self.forgotten.update((entry.id, node) for node, entry in parts)
                self._reopen_deadline(scope, count)

    def _reopen_deadline(self, scope: Node, count: Node) -> None:
        assert count.entry is not None, "it is recorded"
        number = count.entry.location[-1]
        assert isinstance(number, int), "a read is named"
        read = self.history.names[number].removesuffix(":count")
        known = self.history.known_number(f"{read}:deadline")
        deadline = None if known is None else scope.children.get(known)
        if deadline is None or deadline.entry is None or not is_of_queue_read(self.history, deadline):
            return
        kind = deadline.entry.kind
        if isinstance(kind, SleepEntry) and kind.state is not SleepState.PENDING:
            self.changes.append((deadline, SleepEntry(kind.deadline_ms, SleepState.PENDING)))

    def _reopen_branches(self, node: Node, kind: JoinEntry | RaceEntry, segments: set[Segment]) -> None:
        names = {self.history.names[segment] for segment in segments if isinstance(segment, int)}
        is_decided = isinstance(kind, RaceEntry) and kind.winner is not None
        for segment, child in node.children.items() if is_decided else ():
            if segment not in segments:  # what a batch that was cut has left of a loser
                self.forgotten.update((below.entry.id, below) for below in child.walk() if below.entry is not None)
        self.changes.append((node, reopened_branches(kind, names)))

    def _reopen_loop(self, node: Node, loop: Entry, kind: LoopEntry, segments: set[Segment]) -> None:
        iteration = min(segment.iteration for segment in segments if isinstance(segment, LoopIteration))
        state = kind.state if iteration >= kind.iteration else self.history.loop_start(loop.id, iteration)
        if state is None:
            raise self._error(
                f"iteration {iteration} of loop {self._path_text(loop)} would be run again, but the loop is in iteration "
                f"{kind.iteration}, and the state that the earlier one began with was not kept; replay from a step of "
                f"iteration {kind.iteration}, or from one before the loop",
                "a step of an earlier iteration",
            )
        self.changes.append((node, LoopEntry(state, min(iteration, kind.iteration), None)))

    # Doing it; durable with the next commit.

    def give_back(self, mailbox: Mailbox) -> None:
        """Put back into the mailbox what forgotten reads had taken, before all that waits there, in the order of reading."""
        held = held_messages(self.history, self.history.root)
        returned = [one for one in held if one.read_id in self.forgotten]
        for one in reversed(returned):
            mailbox.put_back(one.message, None)
        if not returned:
            return
        # What stays read may still have to go back, if its branch loses a race; it was read before, and so goes before.
        for one in reversed(held):
            detail = self.history.detail(one.entry.id)
            if one.read_id not in self.forgotten and "sequence" in detail:
                self.history.put_detail(one.entry.id, {**detail, "sequence": mailbox.place_in_front()})

    def reopen(self) -> None:
        """Record what changes of what stays."""
        history = self.history
        for node, kind in self.changes:
            entry = node.entry
            assert entry is not None, "it is recorded"
            before = entry.kind
            if kind != before:
                history.change(node, kind)
            if isinstance(kind, LoopEntry):
                self._reopen_loop_metadata(node, entry, kind)
            elif isinstance(kind, JoinEntry | RaceEntry):
                self._forget_failures(entry, kind)
        self._forget_rollback_failures()

    def _reopen_loop_metadata(self, node: Node, loop: Entry, kind: LoopEntry) -> None:
        metadata = self.history.metadata(loop.id)
        if metadata is not None and metadata.status is not EntryStatus.RUNNING:
            metadata.status = EntryStatus.RUNNING
            metadata.completed_at_ms = None
            self.history.put_metadata(node, metadata)
        self.history.forget_loop_starts(loop.id, kind.iteration)

    def _forget_failures(self, entry: Entry, kind: JoinEntry | RaceEntry) -> None:
        detail = self.history.detail(entry.id)
        stored: dict[str, object] = detail.get("branches", {})
        kept = {name: failure for name, failure in stored.items() if kind.branches[name].status is BranchStatus.FAILED}
        if len(kept) < len(stored):
            self.history.put_detail(entry.id, {**detail, "branches": kept})

    def _forget_rollback_failures(self) -> None:
        """A later rollback begins with fresh counts."""
        for node in self.history.root.walk():
            entry = node.entry
            if entry is None or entry.id in self.forgotten:
                continue
            metadata = self._step_metadata(entry)
            if metadata is None or metadata.rollback_error is None:
                continue
            metadata.rollback_error = None
            self.history.put_metadata(node, metadata)
            detail = self.history.detail(entry.id)
            kept = {key: value for key, value in detail.items() if not key.startswith("rollback_")}
            if len(kept) < len(detail):
                self.history.put_detail(entry.id, kept)
