"""Every primitive, and every nesting of two, with the process dying at every write; the table is in support/nestings.py.

1. For each write of a run: a death just before it and just after it; and each of these once more with a second death at the
   first write of the recovery (after it where the first was before its own, and the other way round). Nothing is sampled, and
   what was explored is what the driver counted.
   Each primitive by itself dies that second time also after every other write of every recovery.
2. Each has to end as the run without a death, as `restarts.play` has it: output or error, history, mailbox, effects.
3. All in memory and in both run modes. In a SQLite file, whose writes take no turn of the scheduler: each row by itself, and
   one in each container, in the run mode that reads more.
4. What needs a supervisor is run under one, on a store of its own. There a death comes at any write of the store: of each
   workflow's namespace, their making, and the catalog. The second death comes as above. That after every other write of the
   recovery comes where the first was before its own: one after a write leaves what one before the next does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import Any, get_args

import pytest
import trio
from disks import Disk, When, scheduled
from harness import DriverKind, Namespace
from incarnations import record_write_points
from nestings import CONTAINERS, HOSTED_ROWS, ROWS, SHORT_S, Container, Row, nested
from restarts import Stage, play
from trio.testing import MockClock
from worlds import World

from perdure.storage import MemoryDriver, StorageError
from perdure.workflow import Context, RunMode, WorkflowFailedError, WorkflowState, load_snapshot, workflow
from perdure.workflow.context import QueueReader
from perdure.workflow.scope import OperationName

pytestmark = pytest.mark.exhaustive

MakeNamespace = Callable[[], Namespace]

WHENS: tuple[When, ...] = ("before", "after")

NO_PRIMITIVES = {"is_evicted"}
"""Methods of a context that neither record nor derive anything."""


def test_every_method_of_the_context_has_a_row() -> None:
    """S39: a new primitive is enumerated, or this is red; and so is a row for what is no primitive any more."""

    def methods(owner: type, prefix: str) -> set[str]:
        names = (name for name, _ in inspect.getmembers(owner, inspect.isfunction))
        return {prefix + name for name in names if not name.startswith("_")}

    has_row = {method for row in (ROWS | HOSTED_ROWS).values() for method in row.methods}
    assert has_row == (methods(Context, "") - NO_PRIMITIVES) | methods(QueueReader, "queue.")
    assert set(get_args(OperationName)) <= has_row


async def explore(
    make_namespace: MakeNamespace, mode: RunMode, container: Container, row: Row, *, is_twice_everywhere: bool = False
) -> None:
    """Play a nesting, with a death at every write."""
    mail = list(row.mail) * container.times

    async def script(stage: Stage) -> None:
        await stage.run()
        for number, name in enumerate(mail):
            await stage.send(name, number)
        await stage.finish()

    pictures: list[dict[str, Any]] = []

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        if not pictures:
            found = {line[0] for line in picture["entries"].values()}
            assert not container.keeps or set(row.kinds) <= found
            assert picture["state"] in (WorkflowState.COMPLETED, WorkflowState.FAILED)
        pictures.append(picture)
        assert _settled(picture, row) == _settled(pictures[0], row)

    exploration = await play(
        make_namespace,
        mode,
        nested(container, row),
        script,
        at_most_once=row.at_most_once,
        is_settled=not row.at_most_once,
        check=check,
        is_twice_everywhere=is_twice_everywhere,
    )
    once = [crash for crash in exploration.explored if crash.again_write == 0]
    assert len(once) >= 4 * exploration.counted
    assert len(pictures) >= 1 + len(exploration.explored)
    assert exploration.counted >= 2


def _settled(picture: dict[str, Any], row: Row) -> dict[str, Any]:
    """A picture without what depends on where the process died: the steps of which nobody knows whether they took place."""
    if not row.at_most_once:
        return {}

    def without(part: dict[Any, Any]) -> dict[Any, Any]:
        return {path: line for path, line in part.items() if path[-1] not in row.at_most_once}

    return {
        **picture,
        "entries": without(picture["entries"]),
        "details": without(picture["details"]),
        "completions": None,
    }


CASES = [
    *((mode, "memory", container, row) for mode in ("yield", "live") for container in CONTAINERS for row in ROWS),
    *(("yield", "sqlite", "nothing", row) for row in ROWS),
    *(("yield", "sqlite", container, "steps with handlers") for container in CONTAINERS if container != "nothing"),
]


@pytest.mark.parametrize(("mode", "driver_kind", "container", "row"), CASES)
async def test_a_primitive_in_a_container_survives_a_death_at_every_write(
    container: str,
    row: str,
    make_quick_namespace: MakeNamespace,
    mode: RunMode,
    driver_kind: DriverKind,
    autojump_clock: MockClock,
) -> None:
    """S17, S30, S39: it ends as it would have without a death, and no acknowledged effect recurs."""
    await explore(make_quick_namespace, mode, CONTAINERS[container], ROWS[row])


@pytest.mark.parametrize("row", ROWS)
async def test_a_primitive_survives_a_second_death_at_every_write_of_the_recovery(
    row: str, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17, S30, S39: of each recovery from each death, by itself, in both run modes."""
    await explore(make_quick_namespace, mode, CONTAINERS["nothing"], ROWS[row], is_twice_everywhere=True)


@pytest.fixture
def driver_kind() -> DriverKind:
    """Memory, unless a test says otherwise."""
    return "memory"


# Under a supervisor.


@dataclass
class Family:
    """A parent with a row in it, and the child that it may call, over any number of processes."""

    disk: Disk
    row: Row
    container: Container
    world: World = field(init=False)
    replies: list[Any] = field(default_factory=list)
    worked: list[str] = field(default_factory=list)
    result: Any = None

    def __post_init__(self) -> None:
        self.world = World(nested(self.container, self.row))

    async def live(self) -> None:
        """One process, to the parent's end."""

        async def work(input: str) -> str:
            self.worked.append(input)
            await trio.lowlevel.checkpoint()
            return f"{input} worked"

        @workflow(name="child")
        async def child(ctx: Context, input: str) -> str:
            await ctx.sleep("nap", 5)
            if input == "fail":
                raise ValueError("no good")
            return await ctx.step("work", work, input)

        @workflow(name="parent")
        async def parent(ctx: Context, _: None) -> Any:
            return await self.world.workflow(ctx, None)

        async with self.disk.process(parent, child, grace=0) as supervisor, trio.open_nursery() as nursery:
            nursery.start_soon(self._die_with_the_store)
            handle = await supervisor.spawn(parent, "p", None)
            for number in range(len(self.replies), len(self.row.mail) * self.container.times):
                reply = await handle.request(self.row.mail[0], number, timeout=SHORT_S, id=f"request {number}")
                self.replies.append(reply)
            try:
                result: Any = await handle.result()
            except WorkflowFailedError as error:
                result = f"failed: {error}"
            nursery.cancel_scope.cancel()
        self.disk.store.check()
        self.result = [result]

    async def _die_with_the_store(self) -> None:
        for doubled in count():
            await trio.sleep(2**doubled)
            self.disk.store.check()

    async def outcome(self) -> Any:
        """All that must be the same, whenever its processes died."""
        snapshot = await load_snapshot(MemoryDriver(dict(self.disk.namespaces["p"])))
        entries = {entry.path: (entry.kind, entry.metadata and entry.metadata.status) for entry in snapshot.entries}
        states = sorted(row.state for row in self.disk.rows.values())
        return [self.result, self.replies, states, entries, set(self.worked), set(self.world.effects)]


@pytest.mark.parametrize("row", HOSTED_ROWS)
@pytest.mark.parametrize("container", CONTAINERS)
async def test_a_primitive_that_needs_a_supervisor_survives_a_death_at_every_write(
    container: str, row: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """S27, S28, S39: what is sent, called or asked arrives once, in every container, whatever write anybody dies at."""

    def make() -> Family:
        return Family(Disk("memory", tmp_path), HOSTED_ROWS[row], CONTAINERS[container])

    first = make()
    with scheduled(1):
        await first.live()
    expected, counted = await first.outcome(), len(first.disk.store.written)
    found = {kind for kind, _ in expected[3].values()}
    assert not first.container.keeps or set(first.row.kinds) <= found
    explored = 0
    for write, when in product(range(counted), WHENS):
        for again in count():
            family = make()
            second: tuple[int, When] = (again, "after" if again or when == "before" else "before")
            deaths, written = await _live_with_deaths(family, (write, when), second)
            assert deaths >= 1, f"the write {write} was never reached"
            assert deaths == 2 or written <= again, f"the recovery did not die at {second}"
            assert family.world.recurred == [], (write, when, second)
            assert await family.outcome() == expected, (write, when, second)
            if deaths < 2 or container != "nothing" or when == "after":
                break
        explored += 1
    assert explored == 2 * counted, "explored equals counted"
    record_write_points(counted)


async def _live_with_deaths(family: Family, first: tuple[int, When], second: tuple[int, When]) -> tuple[int, int]:
    """Let a family live to its end, dying at two writes: one of the first process, and one of the next.

    Returns:
        How often it died, and how many writes its last process made.
    """
    family.disk.store.die_at = first
    deaths = 0
    while not family.result:
        try:
            with scheduled(1):
                await family.live()
        except* StorageError:
            assert family.disk.store.is_dead
            deaths += 1
        if deaths == 1 and not family.result:
            family.disk.next_store().die_at = second
    return deaths, len(family.disk.store.written)
