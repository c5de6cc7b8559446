"""Whole namespaces with one value damaged, each of them in turn: a typed error that names the workflow; the others go on.

What is met as it should be is said in `support/survival.py`; the namespaces are those of `support/guests.py`, at every moment at
which something is open. `make fuzz` damages each value in many more ways.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import trio
from damage import misshapen, mutated
from guests import BYSTANDER, GUEST, MOMENTS, Guest, Moment, hosted, recorded
from harness import MovableClock, scheduled
from survival import Damage, host_with, read_with
from trio.testing import MockClock

from perdure.storage import DecodeError, MemoryDriver, PerdureError, encode_value, layout
from perdure.storage.keys import unpack
from perdure.workflow import WorkflowState, load_snapshot

HOSTED = 45
"""Of how many values each moment's are hosted here."""
KNOWN = {
    *((3, field) for field in range(1, 5)),
    *((32, field) for field in range(1, 18)),
    *((37, field) for field in range(1, 3)),
    *((first,) for first in (1, 2, 4, 33, 34, 35, 36, 38, 39)),
} - {(32, 3)}
"""What begins the keys of a namespace. Alarms are checked where they are read."""


async def left_open(moment: Moment) -> Guest:
    """What the guest left, and what only a death between two batches leaves."""
    with scheduled(1):  # else names would be numbered otherwise each time
        found = await recorded(moment)
    pairs = found.namespaces[GUEST]
    pairs.setdefault(layout.DUTIES_KEY, encode_value(["tell"]))
    pairs.setdefault(layout.IDLE_ACTIVATIONS_KEY, layout.encode_u64(1))
    return found


def kind_of(key: bytes) -> tuple[object, ...]:
    parts = unpack(key)
    return parts[:2] if parts[0] in (3, 32, 37) else parts[:1]


async def test_the_namespaces_hold_every_kind_of_value(autojump_clock: MockClock) -> None:
    """S41: so what follows damages every kind."""
    kinds = set()
    for moment in MOMENTS:
        found = await left_open(moment)
        kinds |= {kind_of(key) for pairs in found.namespaces.values() for key in pairs}
    assert kinds >= KNOWN


def damages(found: Guest, moment: Moment, each: int) -> Iterator[Damage]:
    """Some for each value of each workflow; which, the moment's name draws."""
    draw = random.Random(moment)
    for workflow_id, pairs in found.namespaces.items():
        sound = list(pairs.values())
        for key, value in pairs.items():
            odd = list(misshapen(value))
            for _ in range(each):
                match draw.randrange(5):
                    case 0 | 1:
                        yield Damage(workflow_id, key, draw.choice(odd))
                    case 2 if key != layout.STATE_KEY:
                        yield Damage(workflow_id, key, None)
                    case _:
                        yield Damage(workflow_id, key, mutated(value, sound, draw))


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_damaged_namespace_is_read_or_refused(moment: Moment, autojump_clock: MockClock) -> None:
    """S41: every value of every workflow: a snapshot, or a `DecodeError`."""
    found = await left_open(moment)
    for damage in damages(found, moment, 1):
        await read_with(found, damage)


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_workflow_with_a_damaged_value_leaves_the_others_alone(
    moment: Moment, autojump_clock: MockClock
) -> None:
    """S41: whatever is asked of it is answered or refused with a typed error, and the supervisor goes on, without spinning."""
    found = await left_open(moment)
    drawn = [damage for damage in damages(found, moment, 1) if damage.workflow_id != BYSTANDER]
    for damage in random.Random(moment).sample(drawn, HOSTED):
        await host_with(found, damage)


async def test_a_supervisor_with_a_damaged_value_of_its_own_says_so_or_goes_on(autojump_clock: MockClock) -> None:
    """S41: a schedule, or a beginning that a limit counts."""
    found = await recorded("waits")
    draw = random.Random(1)
    for key, value in found.own.items():
        for odd in [*misshapen(value), *(mutated(value, list(found.own.values()), draw) for _ in range(10)), None][::3]:
            await host_with(found, Damage("", key, odd))


async def test_the_error_names_the_workflow_and_the_workflow_goes_on_once_its_value_is_back(
    autojump_clock: MockClock,
) -> None:
    """S41: damage to what a wake-up needs; after repair it ends as it should, and the state was never touched."""
    found = await recorded("races")
    pairs = found.namespaces[GUEST]
    entry = next(key for key in pairs if key.startswith(layout.HISTORY_PREFIX))
    store = found.changed(GUEST, entry, b"\x01\x00damaged")
    clock = MovableClock(found.now_ms - round(trio.current_time() * 1000))
    async with hosted(store, clock) as supervisor:
        handle = await supervisor.get(GUEST)
        with pytest.raises(DecodeError) as caught:
            await handle.message("word", "end")
        trouble = supervisor.troubles().get(GUEST)
        assert trouble is None or isinstance(trouble, PerdureError)
        assert "workflow 'guest' cannot be read" in str(caught.value)
    repaired = store.restart()
    repaired._disk.namespaces[GUEST][entry] = pairs[entry]
    async with hosted(repaired, clock) as supervisor:
        handle = await supervisor.get(GUEST)
        await handle.message("word", "end")
        assert await handle.result() == "end"
    snapshot = await load_snapshot(MemoryDriver(repaired._disk.namespaces[GUEST]))
    assert snapshot.state is WorkflowState.COMPLETED


async def test_who_asks_for_a_reply_that_is_gone_is_told_so(autojump_clock: MockClock) -> None:
    """S41: the request is on record as answered; to wait for the reply would be to wait for ever, and to look again and again."""
    found = await recorded("races")
    store = found.changed(GUEST, layout.reply_key("m-ask"), None)
    clock = MovableClock(found.now_ms - round(trio.current_time() * 1000))
    async with hosted(store, clock) as supervisor:
        handle = await supervisor.get(GUEST)
        with trio.fail_after(10), pytest.raises(DecodeError, match="its reply is not stored"):
            await handle.request("ask", id="m-ask", timeout=5.0)
        await handle.message("word", "end")
        assert await handle.result() == "end"
