"""`recover()`: what of a failed workflow's history is to happen again. Decided here, on plain data; nothing is awaited.

1. Reset are: the exhausted steps and the failed branches among the causes of the failure, and the steps that were undone.
   They are as if they had not run, and run again with fresh counts. An undone step is to have effect again, so it gets another
   idempotency key: its detail counts how often it was undone.
2. What encloses one of them is reopened: a settled branch runs again over what it recorded, a decided race is undecided, a
   loop goes back to the earliest iteration that holds one. An iteration whose starting state is not known stays as it is.
3. Nothing else changes: what was recorded replays. But the code may take another way once what failed has succeeded, so what
   was recorded after the first thing that is reset need not be asked for any more.
4. A call of another workflow is reset as a step is; what becomes of the workflow that it called is decided there
   (`children.py`).
5. Where it is not known what failed the workflow (the reference engine does not say), every exhausted step may have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from perdure.storage.schema import (
    Branch,
    BranchStatus,
    Entry,
    EntryMetadata,
    EntryStatus,
    JoinEntry,
    LoopEntry,
    LoopIteration,
    RaceEntry,
    Segment,
    StepEntry,
)
from perdure.workflow.history import History, Node
from perdure.workflow.ids import is_ordered
from perdure.workflow.rollback import UNDOING
from perdure.workflow.states import WorkflowEvent, WorkflowState

__all__ = ["reopen", "reopened_branches"]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A node, and the way to it."""

    node: Node
    segment: Segment | None = None
    above: _Place | None = None

    def way_up(self) -> Iterator[tuple[_Place, _Place]]:
        """Each place from here to the top, with the one above it."""
        place = self
        while place.above is not None:
            yield place, place.above
            place = place.above


def reopen(history: History) -> bool:
    """Make a failed workflow runnable again.

    Returns:
        Whether it had failed; otherwise nothing changes.
    """
    if history.state is not WorkflowState.FAILED:
        return False
    places = list(_places(history.root))
    steps = [place for place in places if _is_reset_step(history, place) and _can_be_reached(history, place)]
    forks = {
        place: names
        for place in places
        if (names := _failed_branches(history, place)) and _can_be_reached(history, place)
    }
    _let_pass(history, steps, forks)
    for place in steps:
        _reset_step(history, place.node)
    _reopen_around(history, steps, forks)
    _forget_attempts_to_undo(history)
    history.clear_error()
    history.set_idle_activations(0)
    history.apply(WorkflowEvent.RECOVER)
    return True


def _places(root: Node) -> Iterator[_Place]:
    stack = [_Place(root)]
    while stack:
        place = stack.pop()
        yield place
        stack.extend(_Place(child, segment, place) for segment, child in place.node.children.items())


# What is reset.


def _is_reset_step(history: History, place: _Place) -> bool:
    entry = place.node.entry
    if entry is None or not isinstance(entry.kind, StepEntry):
        return False
    metadata = history.metadata(entry.id)
    if metadata is None:
        return False
    causes = history.failure_causes
    is_cause = metadata.status is EntryStatus.EXHAUSTED and (causes is None or entry.id in causes)
    return is_cause or metadata.rollback_completed_at_ms is not None


def _failed_branches(history: History, place: _Place) -> set[str]:
    """The names of the failed branches of a join or race that failed the workflow."""
    entry = place.node.entry
    causes = history.failure_causes
    if entry is None or not isinstance(entry.kind, JoinEntry | RaceEntry) or causes is None or entry.id not in causes:
        return set()
    return {name for name, branch in entry.kind.branches.items() if branch.status is BranchStatus.FAILED}


def _can_be_reached(history: History, place: _Place) -> bool:
    """Whether every loop around it can go back to the iteration that it is in, or has not come so far."""
    for inner, outer in place.way_up():
        entry = outer.node.entry
        if isinstance(inner.segment, LoopIteration) and entry is not None and isinstance(entry.kind, LoopEntry):
            iteration = inner.segment.iteration
            if iteration < entry.kind.iteration and history.loop_start(entry.id, iteration) is None:
                return False
    return True


def _let_pass(history: History, steps: list[_Place], forks: dict[_Place, set[str]]) -> None:
    """The code need not ask for what was recorded after the first thing that is reset."""
    firsts = [_entry_of(place).id for place in steps]
    for place, names in forks.items():
        for name in names:
            number = history.known_number(name)
            branch = None if number is None else place.node.children.get(number)
            ids = [] if branch is None else [node.entry.id for node in branch.walk() if node.entry is not None]
            firsts.append(max(ids, default=_entry_of(place).id))
    if not firsts:
        return
    recorded = [entry.id for entry in history.entries()]
    ordered = [entry_id for entry_id in recorded if is_ordered(entry_id)]
    first = min(entry_id if is_ordered(entry_id) else "" for entry_id in firsts)
    history.let_pass(first, max(ordered, default=""))
    if len(ordered) < len(recorded):
        history.let_pass("", "")  # another engine's ids do not say whether they came before or after


def _entry_of(place: _Place) -> Entry:
    entry = place.node.entry
    assert entry is not None, "what is reset is recorded"
    return entry


# How.


def _reset_step(history: History, node: Node) -> None:
    entry = node.entry
    assert entry is not None, "the step is recorded"
    metadata = history.metadata(entry.id)
    assert metadata is not None, "a step that has an outcome has metadata"
    history.change(node, StepEntry(None, None))
    history.put_metadata(node, EntryMetadata(created_at_ms=metadata.created_at_ms))
    detail = history.detail(entry.id)
    kept: dict[str, Any] = {}
    if undone := detail.get("undone", 0) + (metadata.rollback_completed_at_ms is not None):
        kept["undone"] = undone
    if "call" in detail:
        kept["call"] = {key: value for key, value in detail["call"].items() if key not in ("failure", "chain")}
    if kept:
        history.put_detail(entry.id, kept)
    else:
        history.delete_detail(entry.id)


def _reopen_around(history: History, steps: list[_Place], forks: dict[_Place, set[str]]) -> None:
    """Reopen whatever encloses something that is reset, each once."""
    branches = {place: set(names) for place, names in forks.items()}
    iterations: dict[_Place, int] = {}
    for place in (*steps, *forks):
        for inner, outer in place.way_up():
            kind = None if outer.node.entry is None else outer.node.entry.kind
            if isinstance(kind, LoopEntry) and isinstance(inner.segment, LoopIteration):
                iterations[outer] = min(iterations.get(outer, kind.iteration), inner.segment.iteration)
            elif isinstance(kind, JoinEntry | RaceEntry) and isinstance(inner.segment, int):
                branches.setdefault(outer, set()).add(history.names[inner.segment])
    for place, names in branches.items():
        _reopen_branches(history, place.node, names)
    for place, iteration in iterations.items():
        _rewind_loop(history, place.node, iteration)


def _reopen_branches(history: History, node: Node, names: set[str]) -> None:
    entry = node.entry
    assert entry is not None, "the join or race is recorded"
    kind = entry.kind
    assert isinstance(kind, JoinEntry | RaceEntry), "only these have branches"
    reopened = reopened_branches(kind, names)
    history.change(node, reopened)
    names = {name for name, branch in reopened.branches.items() if branch.status is BranchStatus.RUNNING}
    detail = history.detail(entry.id)
    kept = {name: failure for name, failure in detail.get("branches", {}).items() if name not in names}
    others = {key: value for key, value in detail.items() if key != "branches"}
    if kept:
        history.put_detail(entry.id, {**others, "branches": kept})
    elif others:
        history.put_detail(entry.id, others)
    else:
        history.delete_detail(entry.id)


def reopened_branches(kind: JoinEntry | RaceEntry, names: Collection[str]) -> JoinEntry | RaceEntry:
    """A join or race in which these branches run again; all of a decided race, whose losers' histories are gone."""
    is_decided = isinstance(kind, RaceEntry) and kind.winner is not None
    running = Branch(BranchStatus.RUNNING, None, None)
    branches = {name: running if is_decided or name in names else branch for name, branch in kind.branches.items()}
    return JoinEntry(branches) if isinstance(kind, JoinEntry) else RaceEntry(None, branches)


def _rewind_loop(history: History, node: Node, iteration: int) -> None:
    entry = node.entry
    assert entry is not None, "the loop is recorded"
    kind = entry.kind
    assert isinstance(kind, LoopEntry), "only these have iterations"
    state = kind.state if iteration == kind.iteration else history.loop_start(entry.id, iteration)
    assert state is not None, "only iterations that can be reached are gone back to"
    history.change(node, LoopEntry(state, iteration, None))
    metadata = history.metadata(entry.id)
    if metadata is not None and metadata.status is not EntryStatus.RUNNING:
        history.put_metadata(node, replace(metadata, status=EntryStatus.RUNNING, completed_at_ms=None))


def _forget_attempts_to_undo(history: History) -> None:
    """Handlers that failed get fresh counts, too, should it come to that again."""
    for node in history.root.walk():
        entry = node.entry
        if entry is None or not isinstance(entry.kind, StepEntry):
            continue
        detail = history.detail(entry.id)
        if "rollback_attempts" in detail:
            history.put_detail(entry.id, {key: value for key, value in detail.items() if key not in UNDOING})
        metadata = history.metadata(entry.id)
        if metadata is not None and metadata.rollback_error is not None:
            history.put_metadata(node, replace(metadata, rollback_error=None))
