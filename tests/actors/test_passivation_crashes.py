"""Workflows that come and go in memory, with one place for all of them, and a process that dies at every write of that.

A client asks for what did not reach the disk, and for nothing else, not even for what it was not told of: from then on only
recovery and alarms bring workflows back. Leaving memory writes little, but what it and the mail write has to be in the
catalog in time; whatever the process dies at, what was asked is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
from disks import Disk, When, scheduled
from harness import DriverKind
from trio.testing import MockClock

from perdure.actors import Supervisor, SupervisorClosedError
from perdure.storage import StorageError, layout
from perdure.workflow import Context, Message, QueueTimeoutError, WorkflowState, current_step, workflow

pytestmark = pytest.mark.exhaustive

WHENS: tuple[When, ...] = ("before", "after")
FOR_ANOTHER: dict[str, Any] = {"idle_timeout": None, "max_live": 1}
AT_ONCE: dict[str, Any] = {"idle_timeout": 0.0, "max_live": 1}
effects: list[str] = []
keys: dict[str, set[str]] = {}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    effects.clear()
    keys.clear()


@pytest.fixture
def make_disk(driver_kind: DriverKind) -> Iterator[Callable[[], Disk]]:
    """Makes empty disks, in memory where the system has such a directory: hundreds of processes die on them."""
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        made: list[Disk] = []

        def make() -> Disk:
            made.append(Disk(driver_kind, Path(directory) / str(len(made))))
            return made[-1]

        yield make


async def effect(name: str) -> str:
    effects.append(name)
    keys.setdefault(name, set()).add(current_step().idempotency_key)
    await trio.lowlevel.checkpoint()
    return name


@workflow(name="order")
async def order(ctx: Context, input: int) -> list[Any]:
    """Leaves memory at a sleep, at a read and at a join of both; another gets its place at each."""
    found: list[Any] = [await ctx.step("take", effect, f"take-{input}")]
    await ctx.sleep("nap", 20)
    found.append((await ctx.queue.next("paid", names=["paid"])).body)

    async def nap(ctx: Context) -> str:
        return (await ctx.sleep("cool", 15)).value

    async def read(ctx: Context) -> Any:
        return (await ctx.queue.next("sent", names=["sent"], timeout=500)).body

    found += (await ctx.join("both", {"nap": nap, "read": read})).values()
    try:
        await ctx.queue.next("nobody", names=["nobody"], timeout=7)
    except QueueTimeoutError:
        found.append(await ctx.step("close", effect, f"close-{input}"))
    return found


@workflow(name="agent")
async def agent(ctx: Context, count: int) -> list[Any]:
    """Is brought back by each message."""
    heard: list[Any] = []
    for number in range(count):
        message: Message[Any] = await ctx.queue.next(f"say-{number}", names=["say"], completable=True)
        heard.append([message.body, await ctx.step(f"do-{number}", effect, f"do-{number}")])
        await message.complete()
    return heard


ORDERS = 2
SAID = 2
EFFECTS = {f"{what}-{number}" for what in ("take", "close") for number in range(ORDERS)} | {
    f"do-{number}" for number in range(SAID)
}
RESULTS = {
    f"o-{number}": [f"take-{number}", f"paid {number}", "completed", f"sent {number}", f"close-{number}"]
    for number in range(ORDERS)
} | {"a": [[number, f"do-{number}"] for number in range(SAID)]}


class Life:
    """A client of some workflows, over any number of processes, and what it was told or knows to be there."""

    def __init__(self, disk: Disk, options: dict[str, Any]) -> None:
        self.disk = disk
        self.options = options
        self.told: set[Any] = set()
        self.asked: set[str] = set()
        self.results: dict[str, Any] = {}
        self.passivated = 0

    async def live(self) -> None:
        """Ask for what is not there yet, and look at the ends when all that takes time has had it."""
        self.told |= self._kept()
        async with self.disk.process(order, agent, **self.options) as supervisor:
            try:
                self._watch(supervisor)
                for number in range(ORDERS):
                    await self._once(supervisor.spawn(order, f"o-{number}", number), f"o-{number}")
                await self._once(supervisor.spawn(agent, "a", SAID), "a")
                for number in range(SAID):
                    await self._send(supervisor, "a", "say", number)
                    await trio.sleep(3)
                for number in range(ORDERS):
                    await self._send(supervisor, f"o-{number}", "paid", f"paid {number}")
                await trio.sleep(25)
                for number in range(ORDERS):
                    await self._send(supervisor, f"o-{number}", "sent", f"sent {number}")
                await trio.sleep(500)
                self.disk.store.check()
                for workflow_id in RESULTS:
                    handle = await supervisor.get(workflow_id)
                    assert await handle.get_state() is WorkflowState.COMPLETED
                    self.results[workflow_id] = await handle.result()
            finally:
                self.passivated += supervisor._residents.passivation.count

    def _kept(self) -> set[Any]:
        """What reached the disk, whether it was acknowledged or not."""
        found: set[Any] = set()
        for workflow_id, namespace in self.disk.namespaces.items():
            if layout.STATE_KEY in namespace:
                found.add(workflow_id)
            found |= {what for what in self.asked if layout.dedup_key(what) in namespace}
        return found

    async def _once(self, do: Any, what: Any) -> None:
        """Do something, unless it was acknowledged."""
        if what in self.told:
            do.close()
            return
        await do
        self.disk.store.check()
        self.told.add(what)

    async def _send(self, supervisor: Supervisor, workflow_id: str, name: str, body: Any) -> None:
        handle = await supervisor.get(workflow_id)  # it was acknowledged
        message_id = f"{workflow_id} {body}"
        self.asked.add(message_id)
        await self._once(handle.message(name, body, id=message_id), message_id)

    def _watch(self, supervisor: Supervisor) -> None:
        def watch(when: When) -> None:
            assert supervisor._residents.slots.taken <= self.options["max_live"]

        self.disk.store.watch = watch

    def check(self, *, deaths: int) -> None:
        """The end is that of a run without a death."""
        assert self.results == RESULTS
        happened = Counter(effects)
        assert happened.keys() == EFFECTS
        assert happened.total() <= len(EFFECTS) + deaths, (
            "a death repeats one effect at most, as one workflow is at work"
        )
        assert all(len(found) == 1 for found in keys.values()), "the idempotency key is the same for every attempt"
        assert {
            row.workflow_id: (row.state, row.next_wake_ms, row.mail_waiting) for row in self.disk.rows.values()
        } == (dict.fromkeys(RESULTS, ("completed", None, False)))
        for namespace in self.disk.namespaces.values():
            assert not [key for key in namespace if key.startswith(layout.MAILBOX_PREFIX)]


async def die(life: Life, write: int, when: When) -> None:
    """One life, with a death at its n-th write."""
    store = life.disk.next_store() if life.disk.lives else life.disk.store
    store.die_at = (write, when)
    try:
        with scheduled(1):
            await life.live()
    except* (StorageError, SupervisorClosedError):
        assert store.is_dead


@pytest.mark.parametrize(
    ("driver_kind", "options"),
    [("memory", FOR_ANOTHER), ("memory", AT_ONCE), ("sqlite", AT_ONCE)],
    indirect=["driver_kind"],
)
async def test_a_death_at_every_write_of_workflows_that_come_and_go(
    make_disk: Callable[[], Disk], options: dict[str, Any], autojump_clock: MockClock
) -> None:
    """S39, S45, S47: before and after every write, the catalog's included; explored equals counted."""
    life = Life(make_disk(), options)
    with scheduled(1):
        await life.live()
    life.check(deaths=0)
    assert life.passivated > 4, "workflows come and go"
    counted, explored = len(life.disk.store.written), 0
    for write in range(counted):
        for when in WHENS:
            effects.clear()
            keys.clear()
            life = Life(make_disk(), options)
            await die(life, write, when)
            assert life.disk.lives == 1, f"it did not die {when} write {write}"
            await life.live()
            life.check(deaths=1)
            explored += 1
    assert explored == 2 * counted, "explored equals counted"


async def test_and_again_while_it_recovers(make_disk: Callable[[], Disk], autojump_clock: MockClock) -> None:
    """S39, S45, S47: at the first writes of the recovery, once more."""
    first = again = 0
    while True:
        effects.clear()
        keys.clear()
        life = Life(make_disk(), AT_ONCE)
        await die(life, first, WHENS[first % 2])
        if not life.disk.lives:
            break
        if not life.results:
            await die(life, again % 7, WHENS[again % 2])
            again += life.disk.lives == 2
        if not life.results:
            await life.live()
        life.check(deaths=life.disk.lives)
        first += 3
    assert first > 60
    assert again > 15
