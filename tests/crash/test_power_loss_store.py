"""Power cuts under a store and under a supervisor: the catalog and the directory lose what was not synced, too.

1. Everything is recorded (`support/power_disk.py`): workflows' files, the catalog, the lock's note, names of files.
2. After a cut the machine has been started anew, which the store knows by its boot id. What it then makes of the directory is
   looked at with the SQLite that is shipped.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
from file_stores import opened, row, spawn
from harness import MovableClock
from power_disk import PLANS, Cut, Plan, Recording
from power_sqlite import map_error
from trio.testing import MockClock

from perdure.actors import Supervisor, open_supervisor
from perdure.storage import layout
from perdure.storage.directory import Host
from perdure.storage.errors import NamespaceNotFoundError
from perdure.storage.file_store import FileStore
from perdure.storage.sqlite_connection import Durability, read_setting
from perdure.workflow import Context, workflow

MARK_KEY = b"\x99"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where the system has one."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


each_way = pytest.mark.parametrize("journal", [True, False], ids=["journal", "files"])
"""Whether new workflows are in the journal, or each has its file at once."""


# The store.


async def live(recording: Recording, *, journal: bool) -> None:
    """Workflows are made, changed, deleted and made again, in two processes. Marks: (id, "begun" or "done", what is there)."""
    options: dict[str, Any] = {"commit_in": "inline", "connect": recording.connect, "map_error": map_error}
    options["journal"] = journal

    async def make(store: FileStore, workflow_id: str, **options: Any) -> None:
        recording.mark((workflow_id, "begun", (options["state"], b"1")))
        await spawn(store, workflow_id, **options)
        driver = await store.open_driver(workflow_id)
        await driver.set(MARK_KEY, b"1")
        recording.mark((workflow_id, "done", (options["state"], b"1")))
        await driver.aclose()

    async def change(store: FileStore, workflow_id: str, state: str, value: bytes) -> None:
        driver = await store.open_driver(workflow_id)
        recording.mark((workflow_id, "begun", (state, value)))
        await driver.set(MARK_KEY, value)
        recording.mark((workflow_id, "done", (state, value)))
        await driver.aclose()

    async def delete(store: FileStore, workflow_id: str) -> None:
        recording.mark((workflow_id, "begun", None))
        await store.delete(workflow_id)
        recording.mark((workflow_id, "done", None))

    with recording.on():
        async with opened(recording.directory, **options) as store:
            await make(store, "a", state="completed", in_one=False)
            await make(store, "b", state="sleeping", alarm=7_000)
            await change(store, "b", "sleeping", b"2")
            await delete(store, "a")
            await make(store, "a", state="failed")  # the others are made in one with their rows
            await delete(store, "a")  # it was new in this life, and its birth must not come back
            await make(store, "a", state="failed")
        async with opened(recording.directory, **options) as store:
            await change(store, "a", "failed", b"3")
            await make(store, "c", state="running", mail=True)
            await delete(store, "b")
            await store.put_rows([row("d")])
    recording.check()


class Heard:
    """A connection of a catalog that notes what is executed on it."""

    def __init__(self, connection: Any, statements: list[str], settings: list[Any]) -> None:
        self._connection = connection
        self._statements = statements
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, sql: str, parameters: Any = (), /) -> Any:
        self._statements.append(sql)
        return self._connection.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Any, /) -> Any:
        self._statements.append(sql)
        return self._connection.executemany(sql, parameters)

    def close(self) -> None:
        self._settings.append([read_setting(self._connection, name) for name in SETTINGS])
        self._connection.close()


SETTINGS = ("journal_mode", "synchronous", "locking_mode", "wal_autocheckpoint", "page_size")


async def test_the_catalog_that_is_cut_is_what_is_shipped(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S40: the disk's SQLite is given the catalog's statements, and takes its settings, as the standard library's does."""
    heard: dict[str, list[str]] = {}
    settings: dict[str, list[Any]] = {}
    for name in ("shipped", "cut"):
        (scratch / name).mkdir()
        recording = Recording(scratch / name)
        heard[name], settings[name] = [], []
        with recording.on() if name == "cut" else nullcontext(), monkeypatch.context() as patched:
            connect = sqlite3.connect

            def listening(path: Any, *, connect: Any = connect, name: str = name, **options: Any) -> Any:
                made = connect(path, **options)
                return Heard(made, heard[name], settings[name]) if str(path).endswith("catalog.sqlite") else made

            patched.setattr(sqlite3, "connect", listening)
            async with opened(recording.directory, commit_in="inline") as store:
                for workflow_id in "abc":
                    await spawn(store, workflow_id)
                await store.put_rows([row("d"), row("e", state="completed")])
                await store.delete("a")
                await store.find_due(10, limit=5)
        assert len(heard[name]) > 20
    assert heard["cut"] == heard["shipped"]
    assert settings["cut"] == settings["shipped"]
    assert settings["cut"], "it was closed"
    assert all(found[0] == "wal" for found in settings["cut"])


def allowed(cut: Cut, workflow_id: str) -> list[object]:
    """What may be there of a workflow: what was last acknowledged, or what was begun after that."""
    found: list[object] = [None]
    for name, what, there in cut.marks:
        if name == workflow_id:
            found = [there] if what == "done" else [*found, there]
    return found


async def look(store: FileStore, workflow_id: str) -> object:
    """State and mark of a workflow, `"empty"` or `None`; and its row says the same."""
    row = await store.get_row(workflow_id)
    try:
        driver = await store.open_driver(workflow_id)
    except NamespaceNotFoundError as error:
        return None if error.path is None and (row is None or row.state == "pending") else f"missed: {error}"
    state, mark, alarm = [await driver.get(key) for key in (layout.STATE_KEY, MARK_KEY, layout.ALARM_KEY)]
    await driver.aclose()
    if state is None:
        return "empty"
    assert row is not None
    assert row.state == state.decode()
    assert row.problem is None
    if alarm is not None:
        assert row.next_wake_ms is not None
        assert row.next_wake_ms <= layout.decode_u64(alarm)
    return state.decode(), mark


@each_way
async def test_a_store_loses_nothing_that_was_acknowledged_and_no_deletion_comes_back(
    scratch: Path, journal: bool
) -> None:
    """S40, S50, S52: each workflow is as it was last acknowledged, or as what was begun then made it, with a row that agrees."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    await live(recording, journal=journal)
    draw = random.Random(1)
    seen: set[int] = set()
    for cut in recording.cuts():
        for plan in ("lost", "scattered", draw.choice(PLANS)):
            image = scratch / "image"
            left = hash((cut.leave(image, plan, draw.randrange(2**32)), cut.marks))
            if left in seen:
                shutil.rmtree(image)
                continue
            seen.add(left)
            where = (cut.number, plan)
            async with opened(image, "boot-2", commit_in="inline", journal=journal) as store:
                for workflow_id in "abc":
                    found = await look(store, workflow_id)
                    may_be = allowed(cut, workflow_id)
                    if found == "empty" or (isinstance(found, tuple) and found[1] == workflow_id.encode()):
                        found = may_be[-1]  # it is being made
                        assert len(may_be) > 1, (where, workflow_id)
                    assert found in may_be, (where, workflow_id)
                assert {each.workflow_id for each in await store.list_rows()} <= set("abcd")
                # It goes on: a workflow is made, and is there after another power cut, as all was closed.
                await spawn(store, "e")
            async with opened(image, "boot-3", commit_in="inline") as store:
                assert await look(store, "e") == ("running", b"e")
            shutil.rmtree(image)
    assert len(seen) > 150


async def test_a_backup_of_everything_is_complete_or_not_there(scratch: Path) -> None:
    """S40: once it is told of, it is there after a power cut; and whenever it is there, all is in it."""
    (scratch / "disk").mkdir()
    recording = Recording(scratch / "disk")
    options: dict[str, Any] = {"commit_in": "inline", "connect": recording.connect, "map_error": map_error}
    with recording.on():
        async with opened(recording.directory / "data", **options) as store:
            for workflow_id in "abc":
                await spawn(store, workflow_id)
            own = await store.open_own()
            await own.set(b"own", b"1")
            await store.backup_all(recording.directory / "copy")
            recording.mark("told")
            await own.aclose()
    recording.check()
    found: set[tuple[bool, bool]] = set()
    draw = random.Random(3)
    for cut in recording.cuts():
        for plan in ("lost", "scattered", draw.choice(PLANS)):
            image = scratch / "image"
            cut.leave(image, plan, draw.randrange(2**32))
            is_there = (image / "copy").exists()
            found.add((bool(cut.marks), is_there))
            if is_there:
                async with opened(image / "copy", "boot-2", commit_in="inline") as store:
                    assert {each.workflow_id for each in await store.list_rows()} == set("abc"), (cut.number, plan)
                    for workflow_id in "abc":
                        assert await look(store, workflow_id) == ("running", workflow_id.encode())
                    own = await store.open_own(create=False)
                    assert await own.get(b"own") == b"1"
                    await own.aclose()
            shutil.rmtree(image)
    assert found == {(False, False), (False, True), (True, True)}


# The supervisor.

EFFECTS = ("first", "second", "third")


class Client:
    """Spawns orders, sends each a message, and waits for all of them; what it is told is marked."""

    def __init__(self, recording: Recording | None, marks: set[object]) -> None:
        self.recording = recording
        self.told = marks
        self.effects: list[tuple[str, str]] = []

    def tell(self, what: object) -> None:
        self.told.add(what)
        if self.recording is not None:
            self.recording.mark(what)

    def workflow(self) -> Any:
        async def effect(workflow_id: str, name: str) -> str:
            # Whatever came before is durable by now.
            self.tell(("safe", workflow_id, EFFECTS.index(name)))
            self.effects.append((workflow_id, name))
            return name

        @workflow(name="order")
        async def order(ctx: Context, input: int) -> list[Any]:
            done = [await ctx.step("first", effect, ctx.workflow_id, "first")]
            await ctx.sleep("nap", 10 * input)
            done.append(await ctx.step("second", effect, ctx.workflow_id, "second"))
            message = await ctx.queue.next("go", names=["go"])
            done.append(await ctx.step("third", effect, ctx.workflow_id, "third"))
            return [*done, message.body]

        return order

    async def live(self, supervisor: Supervisor, order: Any) -> None:
        """Ask for what was not acknowledged."""
        for number in range(3):
            workflow_id = f"o-{number}"
            if ("spawned", workflow_id) not in self.told:
                await supervisor.spawn(order, workflow_id, number)
                self.tell(("spawned", workflow_id))
            # What was acknowledged is there: this makes nothing.
            handle = await supervisor.get(workflow_id)
            if ("sent", workflow_id) not in self.told:
                await handle.message("go", number, id="m")
                self.tell(("sent", workflow_id))
        for number in range(3):
            workflow_id = f"o-{number}"
            with trio.fail_after(10_000):
                result = await (await supervisor.get(workflow_id)).result()
            assert result == [*EFFECTS, number]
            self.tell(("ended", workflow_id))


@asynccontextmanager
async def supervised(
    directory: Path, boot_id: str, workflows: list[Any], recording: Recording | None, **options: Any
) -> Any:
    store_options: dict[str, Any] = {"host": Host(boot_id=lambda: boot_id), "commit_in": "inline"}
    store_options |= {name: options.pop(name) for name in ("durability", "journal")}
    if recording is not None:
        store_options |= {"connect": recording.connect, "map_error": map_error}
    store = FileStore(directory, **store_options)
    async with open_supervisor(store, workflows, clock=MovableClock(), **options) as supervisor:
        yield supervisor


@each_way
@pytest.mark.parametrize("options", [{}, {"idle_timeout": 0.0, "max_live": 1}], ids=["resident", "passive"])
@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_a_supervisor_goes_on_after_a_power_cut(
    scratch: Path, durability: Durability, options: dict[str, Any], journal: bool, autojump_clock: MockClock
) -> None:
    """S40, S50: every workflow ends right. At full, what was acknowledged is there: workflows, messages, steps and results.

    At normal the client asks again for what it had been told: each of its requests may be lost, and none is done twice.
    """
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    options = {**options, "durability": durability, "journal": journal}
    first = Client(recording, set())
    order = first.workflow()
    with recording.on():
        async with supervised(recording.directory, "boot-1", [order], recording, **options) as host:
            await first.live(host, order)
    recording.check()
    assert len(first.effects) == 9
    draw = random.Random(1)
    repeated = 0
    cuts = (
        (cut, plan)
        for cut in recording.cuts()
        # At full, the worst at each: nothing is there but what was synced.
        for plan in dict.fromkeys((*(("lost",) if durability == "full" else ()), draw.choice(PLANS)))
    )
    for cut, plan in cuts:
        image = scratch / "image"
        cut.leave(image, plan, cut.number)
        told = set(cut.marks) if durability == "full" else set()
        client = Client(None, told)
        order = client.workflow()
        safe = {(mark[1], EFFECTS[n]) for mark in told if mark[0] == "safe" for n in range(mark[2])}
        ended = {(mark[1], name) for mark in told if mark[0] == "ended" for name in EFFECTS}
        async with supervised(image, "boot-2", [order], None, **options) as host:
            await client.live(host, order)
        assert not (safe | ended) & set(client.effects), "what was recorded is not done again"
        assert len(client.effects) == len(set(client.effects))
        done = {(mark[1], EFFECTS[mark[2]]) for mark in cut.marks if mark[0] == "safe"}
        assert done | set(client.effects) == set(first.effects), "nothing was left out"
        repeated += len(done & set(client.effects))
        shutil.rmtree(image)
    assert repeated, "a step whose record was lost is done again"


# Workflows among themselves.


class Family:
    """A caller whose child asks a third workflow, by messages through both."""

    def __init__(self, recording: Recording | None) -> None:
        self.recording = recording
        self.effects: list[str] = []

    def workflows(self) -> list[Any]:
        async def effect(name: str) -> str:
            if self.recording is not None:
                self.recording.mark(("did", name))
            self.effects.append(name)
            return name

        @workflow(name="child")
        async def child(ctx: Context, input: int) -> str:
            await ctx.sleep("nap", 5)
            await ctx.send("tell", "peer", "word", f"from child {input}")
            return await ctx.step("work", effect, f"child {input}")

        @workflow(name="caller")
        async def caller(ctx: Context, input: None) -> list[Any]:
            found: list[Any] = []
            for number in range(2):
                found.append(await ctx.call(f"call-{number}", child, number))
                await ctx.step(f"after-{number}", effect, f"after {number}")
            await ctx.send("tell", "peer", "word", "from caller")
            return found

        @workflow(name="peer")
        async def peer(ctx: Context, input: None) -> list[Any]:
            words: list[Any] = []
            for number in range(3):
                words.append((await ctx.queue.next(f"word-{number}", names=["word"])).body)
                await ctx.step(f"heard-{number}", effect, words[-1])
            return words

        return [caller, child, peer]


FAMILY_EFFECTS = ["after 0", "after 1", "child 0", "child 1", "from caller", "from child 0", "from child 1"]


@each_way
async def test_workflows_that_deal_with_each_other_agree_after_a_power_cut(
    scratch: Path, journal: bool, autojump_clock: MockClock
) -> None:
    """S40: at full a call has one child, and a message is read once, whatever was not safe in each of their files.

    At normal there is no such promise: what one file says of another may be all that is left of it.
    """
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")

    async def live(directory: Path, boot_id: str, family: Family) -> None:
        flows = family.workflows()
        options: dict[str, Any] = {"durability": "full", "journal": journal, "idle_timeout": 0.0}
        async with supervised(directory, boot_id, flows, family.recording, **options) as host:
            asker = await host.spawn(flows[0], "caller", None)
            other = await host.spawn(flows[2], "peer", None)
            with trio.fail_after(100_000):
                assert await asker.result() == ["child 0", "child 1"]
                assert await other.result() == ["from child 0", "from child 1", "from caller"]
            assert await host.count() == 4

    first = Family(recording)
    with recording.on():
        await live(recording.directory, "boot-1", first)
    recording.check()
    assert sorted(first.effects) == FAMILY_EFFECTS
    draw = random.Random(2)
    for cut in recording.cuts():
        image = scratch / "image"
        plan: Plan = draw.choice(("lost", "scattered", "some files", "some files"))
        cut.leave(image, plan, cut.number)
        family = Family(None)
        try:
            await live(image, "boot-2", family)
        except BaseException as error:
            error.add_note(f"{plan} at {cut.number}, after {cut.marks}")
            raise
        done = {name for _, name in cut.marks}
        assert sorted(done | set(family.effects)) == FAMILY_EFFECTS
        assert len(family.effects) == len(set(family.effects))
        shutil.rmtree(image)
