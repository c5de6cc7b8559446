"""One process owns a data directory: real processes, real forks, a real `kill -9`.

Processes are in step through pipes: each line that one says is waited for by the other.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from file_stores import read, spawn

from perdure.storage.errors import StorageError, StoreLockedError
from perdure.storage.file_store import FileStore
from perdure.storage.sqlite import SqliteDriver

PREAMBLE = """
import os, sys
import trio
from file_stores import read, spawn
from perdure.storage.errors import StorageError, StoreLockedError
from perdure.storage.file_store import FileStore

data = sys.argv[1]

def say(*words):
    print(*words, flush=True)

def listen():
    return sys.stdin.readline().strip()
"""


@contextmanager
def process(script: str, data: Path) -> Generator[subprocess.Popen[str], None, None]:
    """Another process on the same directory, with pipes to it, killed in the end."""
    support = str(Path(__file__).parents[1] / "support")
    path = os.pathsep.join(filter(None, [support, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PREAMBLE + script, str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def said(child: subprocess.Popen[str]) -> list[str]:
    assert child.stdout is not None
    return child.stdout.readline().split()


def tell(child: subprocess.Popen[str], text: str) -> None:
    assert child.stdin is not None
    child.stdin.write(text + "\n")
    child.stdin.flush()


def content(data: Path) -> dict[str, str]:
    return {
        str(path.relative_to(data)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in data.rglob("*")
        if path.is_file()
    }


HOLD = """
async def main():
    store = FileStore(data)
    await store.acquire()
    await spawn(store, "order-1")
    driver = await store.open_driver("order-1")
    for number in range(100):
        await driver.set(b"last", b"%d" % number)
        say("committed", number)
        if listen() == "stop":
            break
    await driver.aclose()
    await store.aclose()
    say("closed")

trio.run(main)
"""


async def test_a_second_process_is_refused_with_the_holders_pid_and_damages_nothing(tmp_path: Path) -> None:
    """S42: what it can reach, the directory and the file of a workflow in use, is refused; the holder goes on."""
    data = tmp_path / "data"
    with process(HOLD, data) as holder:
        assert said(holder) == ["committed", "0"]
        before = content(data)
        for _ in range(3):
            store = FileStore(data)
            with pytest.raises(StoreLockedError, match=f"process {holder.pid}") as caught:
                await store.acquire()
            assert caught.value.holder_pid == holder.pid
            with pytest.raises(StorageError, match="acquire"):
                await store.open_driver("order-1", create=True)
            await store.aclose()
        [file] = [path for path in before if path.endswith(".sqlite") and path.startswith("workflows")]
        with pytest.raises(StorageError, match="another process"):
            await SqliteDriver.open(data / file)
        assert content(data) == before
        tell(holder, "go on")
        assert said(holder) == ["committed", "1"]
        tell(holder, "stop")
        assert said(holder) == ["closed"]
        holder.wait()
    store = FileStore(data)
    await store.acquire()
    driver = await store.open_driver("order-1")
    assert await driver.get(b"last") == b"1"
    await driver.aclose()
    await store.aclose()


async def test_a_killed_process_does_not_block_and_loses_nothing(tmp_path: Path) -> None:
    """S42: `kill -9`, three times over."""
    data = tmp_path / "data"
    for round_number in range(3):
        with process(HOLD, data) as holder:
            for number in range(round_number + 1):
                assert said(holder) == ["committed", str(number)]
                tell(holder, "go on") if number < round_number else None
            holder.kill()
            holder.wait()
        store = FileStore(data)
        await store.acquire()
        driver = await store.open_driver("order-1")
        assert await driver.get(b"last") == b"%d" % round_number
        await driver.aclose()
        row = await store.get_row("order-1")
        assert row is not None
        assert row.state == "running"
        await store.delete("order-1")
        await store.aclose()


FORK = """
store = FileStore(data, commit_in="inline")
drivers = []

async def begin():
    await store.acquire()
    await spawn(store, "order-1")
    drivers.append(await store.open_driver("order-1"))
    await drivers[0].set(b"last", b"before the fork")

async def refused(what, use):
    try:
        await use
    except StoreLockedError as error:
        say(what, error.holder_pid)
    except StorageError as error:
        say(what, type(error).__name__)
    else:
        say(what, "was done")

async def child():
    await refused("acquire", FileStore(data, commit_in="inline").acquire())
    await refused("again", store.acquire())
    await refused("open", store.open_driver("order-2", create=True))
    await refused("put", store.put_rows([]))
    await refused("delete", store.delete("order-1"))
    await refused("driver", drivers[0].set(b"last", b"by the child"))
    await drivers[0].aclose()
    await store.aclose()
    say("closed")

async def go_on():
    await drivers[0].set(b"last", b"after the fork")
    await spawn(store, "order-2")

trio.run(begin)
say("begun")
pid = os.fork()
if pid == 0:
    trio.run(child)
    drivers.clear()
    del store  # And then the end of the interpreter, with all that finalises.
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
trio.run(go_on)
say("done")
listen()
"""


async def test_a_fork_is_refused_and_its_end_damages_nothing(tmp_path: Path) -> None:
    """S42: not even by finalising the connections that it inherited, after which the parent is killed."""
    data = tmp_path / "data"
    with process(FORK, data) as parent:
        assert said(parent) == ["begun"]
        pid = str(parent.pid)
        for what in ("acquire", "again", "open", "put", "delete"):
            assert said(parent) == [what, pid]
        assert said(parent) == ["driver", "DriverClosedError"]
        assert said(parent) == ["closed"]
        assert said(parent) == ["done"]
        with pytest.raises(StoreLockedError, match=pid):
            await FileStore(data).acquire()
        parent.kill()
        parent.wait()
    store = FileStore(data)
    await store.acquire()
    driver = await store.open_driver("order-1")
    assert await driver.get(b"last") == b"after the fork"
    await driver.aclose()
    assert await read(store, "order-2") == b"order-2"
    assert [row.workflow_id for row in await store.list_rows()] == ["order-1", "order-2"]
    await spawn(store, "order-3")
    await store.aclose()


ORPHAN = """
async def main():
    store = FileStore(data, commit_in="inline")
    await store.acquire()
    await spawn(store, "order-1")
    return store

store = trio.run(main)
pid = os.fork()
if pid == 0:
    say("child", os.getpid())
listen()
"""


async def test_a_fork_that_outlives_its_killed_parent_does_not_block(tmp_path: Path) -> None:
    """S42: the lock dies with its holder, not with the last copy of a descriptor."""
    data = tmp_path / "data"
    with process(ORPHAN, data) as parent:
        _, child = said(parent)
        parent.kill()
        parent.wait()
        os.kill(int(child), 0)
        store = FileStore(data)
        await store.acquire()
        assert await read(store, "order-1") == b"order-1"
        await store.aclose()


async def test_a_store_can_be_used_in_one_trio_run_after_another(tmp_path: Path) -> None:
    """A store made before Trio runs is fine, as is one that is opened again."""
    script = """
store = FileStore(data)

async def once(number):
    await store.acquire()
    await spawn(store, f"order-{number}")
    say(await store.count_rows())
    await store.aclose()

for number in range(3):
    trio.run(once, number)
"""
    with process(script, tmp_path / "data") as child:
        assert [said(child) for _ in range(3)] == [["1"], ["2"], ["3"]]
        assert child.wait() == 0
    store = FileStore(tmp_path / "data")
    await store.acquire()
    await spawn(store, "order-9")
    await store.aclose()
