"""Reading a workflow without running it."""

from __future__ import annotations

from typing import Any

from perdure.storage import Driver, decode_value
from perdure.storage.schema import (
    KIND_NAMES,
    Branch,
    Entry,
    EntryKind,
    EntryMetadata,
    JoinEntry,
    LoopEntry,
    MessageEntry,
    RaceEntry,
    RemovedEntry,
    RollbackCheckpointEntry,
    SleepEntry,
    StepEntry,
    VersionCheckEntry,
)
from perdure.workflow.checks import check_driver
from perdure.workflow.failures import info_from_map
from perdure.workflow.history import History, Path, order_of_location
from perdure.workflow.types import HistoryEntry, WorkflowSnapshot

__all__ = ["error_of", "history_entries", "history_entry", "load_snapshot", "snapshot_of"]


async def load_snapshot(driver: Driver) -> WorkflowSnapshot:
    """Read a workflow's state, input, output, error and history. Writes nothing; nothing needs to run.

    Args:
        driver: The workflow's namespace; no activation may be using it meanwhile.

    Raises:
        InvalidArgumentError: It is no driver.
        DecodeError: What is stored is damaged.
    """
    check_driver(driver)
    return snapshot_of(await History.load("", driver))


def snapshot_of(history: History) -> WorkflowSnapshot:
    """A loaded history as plain data."""
    return WorkflowSnapshot(
        state=history.state,
        input=_decoded(history.input),
        output=_decoded(history.output),
        error=error_of(history),
        entries=history_entries(history),
    )


def error_of(history: History) -> Any:
    """What the workflow failed with, or `None`."""
    return None if history.error is None else info_from_map(decode_value(history.error))


def history_entries(history: History) -> tuple[HistoryEntry, ...]:
    """Every entry, in order of location."""
    return tuple(
        history_entry(history.path_of(entry.location), entry, history.metadata(entry.id))
        for entry in sorted(history.entries(), key=lambda entry: order_of_location(entry.location))
    )


def history_entry(path: Path, entry: Entry, metadata: EntryMetadata | None) -> HistoryEntry:
    """An entry as plain data, its user values decoded."""
    return HistoryEntry(path, KIND_NAMES[type(entry.kind)], _data(entry.kind), metadata, entry.id)


def _decoded(data: bytes | None) -> Any:
    return None if data is None else decode_value(data)


def _branches(branches: dict[str, Branch]) -> dict[str, Any]:
    return {
        name: {"status": branch.status.name.lower(), "output": _decoded(branch.output), "error": branch.error}
        for name, branch in branches.items()
    }


def _data(kind: EntryKind) -> dict[str, Any]:
    match kind:
        case StepEntry():
            return {"output": _decoded(kind.output), "error": kind.error}
        case LoopEntry():
            return {"state": _decoded(kind.state), "iteration": kind.iteration, "output": _decoded(kind.output)}
        case SleepEntry():
            return {"deadline_ms": kind.deadline_ms, "state": kind.state.name.lower()}
        case MessageEntry():
            return {"name": kind.name, "body": _decoded(kind.body)}
        case RollbackCheckpointEntry():
            return {"name": kind.name}
        case JoinEntry():
            return {"branches": _branches(kind.branches)}
        case RaceEntry():
            return {"winner": kind.winner, "branches": _branches(kind.branches)}
        case RemovedEntry():
            return {"original_type": kind.original_type, "original_name": kind.original_name}
        case VersionCheckEntry():
            return {"resolved": kind.resolved, "latest": kind.latest}
