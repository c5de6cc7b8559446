"""History in memory: names, places, what is open, and that a reload gives back what was committed."""

from __future__ import annotations

import pytest
from harness import Namespace

from perdure.storage import DecodeError, Driver, commit_batch, encode_value, layout
from perdure.storage.schema import (
    Entry,
    EntryMetadata,
    EntryStatus,
    LoopEntry,
    LoopIteration,
    MessageEntry,
    Segment,
    SleepEntry,
    SleepState,
    StepEntry,
    encode_entry,
)
from perdure.storage.values import UNDEFINED
from perdure.workflow.history import History, Node
from perdure.workflow.states import WorkflowEvent, WorkflowState

ids = iter(range(10**6))


def put(history: History, path: tuple[str | tuple[str, int], ...], kind: object) -> Node:
    """Record an entry at a place given by names and (loop, iteration) pairs."""
    node = history.root
    location: list[Segment] = []
    for part in path:
        if isinstance(part, str):
            segment: Segment = history.number_of(part)
        else:
            segment = LoopIteration(history.number_of(part[0]), part[1])
        location.append(segment)
        node = node.children.setdefault(segment, Node())
    history.put_entry(node, Entry(f"018bcfe5-6800-7000-8000-{next(ids):012}", tuple(location), kind))  # type: ignore[arg-type]
    return node


async def commit(driver: Driver, history: History) -> None:
    batch = history.pending.take()
    if batch:
        await commit_batch(driver, batch)


def picture(history: History) -> dict[str, object]:
    """All of a history that a reload has to give back."""
    entries = sorted(history.entries(), key=lambda entry: entry.id)
    return {
        "names": history.names,
        "entries": entries,
        "metadata": {entry.id: history.metadata(entry.id) for entry in entries},
        "details": {entry.id: history.detail(entry.id) for entry in entries},
        "open": (sorted(history.open_sleeps, key=repr), sorted(history.open_retries)),
        "fields": (history.state, history.input, history.output, history.error, history.alarm_ms),
        "own": (history.workflow_type, history.seed, history.format_version, history.idle_activations),
        "causes": history.failure_causes,
        "last": history.last_entry_id,
    }


def filled() -> History:
    """A history with everything in it."""
    history = History("w")
    history.create("order", encode_value({"sku": 7}), b"s" * 16)
    step = put(history, ("charge",), StepEntry(encode_value([1]), None))
    assert step.entry is not None
    history.put_metadata(step, EntryMetadata(EntryStatus.COMPLETED, None, 2, 10, 5, 11))
    failed = put(history, ("a/b",), StepEntry(None, "ValueError: no"))
    assert failed.entry is not None
    history.put_metadata(failed, EntryMetadata(EntryStatus.FAILED, "ValueError: no", 1, 10, 5))
    history.put_detail(failed.entry.id, {"kind": "exhausted"})
    put(history, ("nap",), SleepEntry(99, SleepState.PENDING))
    put(history, ("q:count",), MessageEntry("*:count", encode_value(0)))
    loop = put(history, ("loop",), LoopEntry(UNDEFINED, 2, None))
    history.put_metadata(loop, EntryMetadata(EntryStatus.RUNNING))
    put(history, ("loop", ("loop", 1), "charge"), StepEntry(None, None))
    put(history, ("loop", ("loop", 2), "nap"), SleepEntry(100, SleepState.PENDING))
    history.apply(WorkflowEvent.PARK)
    history.set_alarm(99)
    history.set_idle_activations(2)
    return history


async def test_a_reload_gives_back_what_was_committed(namespace: Namespace) -> None:
    """S15: names, entries, metadata, details, what is open, and the workflow's fields."""
    driver = await namespace.driver()
    history = filled()
    last = max(entry.id for entry in history.entries())
    await commit(driver, history)
    loaded = await History.load("w", driver)
    expected = picture(history) | {"last": last}
    assert picture(loaded) == expected
    assert loaded.names == ["charge", "a/b", "nap", "q:count", "loop"]
    assert len(loaded.open_sleeps) == 2
    assert len(loaded.open_retries) == 1
    loaded.set_error(encode_value({"name": "E", "message": "m"}), ["id-1"])
    loaded.apply(WorkflowEvent.FAIL)
    loaded.set_output(encode_value(5))
    loaded.set_alarm(None)
    loaded.set_idle_activations(0)
    await commit(driver, loaded)
    assert picture(await History.load("w", driver)) == picture(loaded)
    await namespace.close()


async def test_an_empty_namespace_is_a_pending_workflow(namespace: Namespace) -> None:
    """S15: nothing stored, nothing to write."""
    history = await History.load("w", await namespace.driver())
    assert history.state is WorkflowState.PENDING
    assert history.input is None
    assert not history.pending.take()
    await namespace.close()


async def test_a_name_is_numbered_once_and_never_renumbered(namespace: Namespace) -> None:
    """S15: over commits and reloads; asking for a number registers the name exactly once."""
    driver = await namespace.driver()
    history = await History.load("w", driver)
    assert [history.number_of(name) for name in ("b", "a", "b", "c", "a")] == [0, 1, 0, 2, 1]
    assert history.known_number("d") is None
    batch = history.pending.take()
    assert batch.puts == [(layout.name_key(n), name.encode()) for n, name in enumerate(("b", "a", "c"))]
    await commit_batch(driver, batch)
    loaded = await History.load("w", driver)
    assert [loaded.known_number(name) for name in ("a", "b", "c", "d")] == [1, 0, 2, None]
    assert loaded.number_of("a") == 1
    assert not loaded.pending.take(), "a known name was written again"
    assert loaded.number_of("d") == 3
    await namespace.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (layout.name_key(1), b"after a gap"),
        (layout.name_key(0), b"\xff"),
        (layout.STATE_KEY, b"dancing"),
        (layout.STATE_KEY, b"\xff"),
        (layout.WORKFLOW_TYPE_KEY, b"\xff"),
        (layout.entry_key((0,)), b"\x01\x00"),
        (layout.entry_key((0,)), encode_entry(Entry("id", (0,), StepEntry(b"\xf6")))),
        (
            layout.entry_key((LoopIteration(0, 1),)),
            encode_entry(Entry("id", (LoopIteration(0, 1),), StepEntry(b"\xf6"))),
        ),
        (layout.IDLE_ACTIVATIONS_KEY, b"\x01"),
        (layout.FORMAT_VERSION_KEY, b""),
        (layout.FAILURE_CAUSES_KEY, b"\x9f"),
        (layout.ALARM_KEY, b"soon"),
    ],
)
async def test_damaged_bytes_raise_a_decode_error_and_nothing_else(
    namespace: Namespace, key: bytes, value: bytes
) -> None:
    """S15: a reload reads what is there or says that it cannot; an entry whose name is lost is not taken for another's."""
    driver = await namespace.driver()
    await driver.set(key, value)
    with pytest.raises(DecodeError):
        await History.load("w", driver)
    await namespace.close()


async def test_metadata_and_details_are_decoded_when_asked_for(namespace: Namespace) -> None:
    """S15: damage there is found by the operation that needs them, not by every load."""
    driver = await namespace.driver()
    history = filled()
    (entry,) = [entry for entry in history.entries() if history.path_of(entry.location) == ("a/b",)]
    await commit(driver, history)
    await driver.set(layout.metadata_key(entry.id), b"\x01\x00\x02")
    await driver.set(layout.detail_key(entry.id), encode_value([1]))
    loaded = await History.load("w", driver)
    with pytest.raises(DecodeError):
        loaded.metadata(entry.id)
    with pytest.raises(DecodeError):
        loaded.detail(entry.id)
    await namespace.close()


async def test_pruning_removes_the_iterations_and_all_that_belongs_to_them(namespace: Namespace) -> None:
    """S12: entries, metadata and details of the pruned iterations, on disk and in memory; others stay, also alike ones."""
    driver = await namespace.driver()
    history = History("w")
    for loop in ("one", "two"):
        put(history, (loop,), LoopEntry(UNDEFINED, 3, None))
        for iteration in range(4):
            inside = (loop, (loop, iteration))
            failed = put(history, (*inside, "step"), StepEntry(None, "E"))
            assert failed.entry is not None
            history.put_metadata(failed, EntryMetadata(EntryStatus.FAILED))
            history.put_detail(failed.entry.id, {"kind": "exhausted"})
            put(history, (*inside, "nap"), SleepEntry(1, SleepState.PENDING))
            nested = put(history, (*inside, "inner"), LoopEntry(UNDEFINED, 0, None))
            history.put_metadata(nested, EntryMetadata(EntryStatus.RUNNING))
            put(history, (*inside, "inner", ("inner", 0), "nap"), SleepEntry(1, SleepState.PENDING))
    await commit(driver, history)
    one = history.root.children[history.number_of("one")]
    assert one.entry is not None
    history.prune_iterations(one, one.entry.location, 0, 3)
    await commit(driver, history)
    paths = {history.path_of(entry.location) for entry in history.entries()}
    assert {path[:2] for path in paths if len(path) > 1} == {("one", 3), *(("two", number) for number in range(4))}
    assert len(history.open_sleeps) == 2 * 5
    assert len(history.open_retries) == 5
    loaded = await History.load("w", driver)
    assert picture(loaded) == picture(history) | {"last": loaded.last_entry_id}
    stored = await namespace.dump()
    assert len([key for key in stored if key.startswith(layout.METADATA_PREFIX)]) == 2 * 5
    assert len([key for key in stored if key.startswith(layout.DETAIL_PREFIX)]) == 5
    await namespace.close()


def test_what_is_open_is_kept_up_to_date() -> None:
    """S11: sleeps and retries that a wake-up has to end are known without a search."""
    history = History("w")
    nap = put(history, ("nap",), SleepEntry(1, SleepState.PENDING))
    step = put(history, ("step",), StepEntry(None, "E"))
    history.put_metadata(step, EntryMetadata(EntryStatus.FAILED))
    assert list(history.open_sleeps.values()) == [nap]
    assert list(history.open_retries.values()) == [step]
    history.change(nap, SleepEntry(1, SleepState.INTERRUPTED))
    history.put_metadata(step, EntryMetadata(EntryStatus.EXHAUSTED))
    assert not history.open_sleeps
    assert not history.open_retries


def test_what_does_not_change_is_not_written() -> None:
    """S11: the same alarm, the same state, the same count."""
    history = filled()
    history.pending.take()
    history.set_alarm(history.alarm_ms)
    history.set_idle_activations(history.idle_activations)
    history.apply(WorkflowEvent.PARK)
    history.adopt("other", b"t" * 16)
    history.delete_detail("id-of-nothing")
    assert not history.pending.take()
    assert history.workflow_type == "order"


async def test_the_last_id_is_the_largest_of_those_that_have_an_order(namespace: Namespace) -> None:
    """S16: beside the reference engine's random ids, which may be larger as text, ours are found and go on from there."""
    theirs, ours = "ffffffff-0000-4000-8000-000000000000", "018bcfe5-6800-7000-8000-000000000001"
    driver = await namespace.driver()
    history = History("w")
    for number, entry_id in enumerate((ours, theirs)):
        location = (history.number_of(f"step {number}"),)
        node = history.root.children[location[0]] = Node()
        history.put_entry(node, Entry(entry_id, location, StepEntry(None, None)))
    await commit(driver, history)
    assert (await History.load("w", driver)).last_entry_id == ours
    await namespace.close()
