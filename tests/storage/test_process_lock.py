"""One owner per data directory: within a process, between processes, across a fork and after a kill."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.storage.errors import StorageError, StoreLockedError, UnsupportedFileSystemError
from perdure.storage.process_lock import LockNote, ProcessLock

HOLD = """
import sys
from pathlib import Path
from perdure.storage.process_lock import ProcessLock
lock = ProcessLock.take(Path(sys.argv[1]))
lock.write_note(7)
"""


@contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process with pipes to it, killed in the end."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_it_is_held_until_it_is_released(path: Path) -> None:
    first = ProcessLock.take(path)
    first.write_note(1)
    with pytest.raises(StoreLockedError, match=rf"this process \(pid {os.getpid()}\)") as caught:
        ProcessLock.take(path)
    assert caught.value.holder_pid == os.getpid()
    first.check()
    first.release()
    first.release()
    second = ProcessLock.take(path)
    assert second.previous == LockNote(os.getpid(), 1)
    second.release()
    with pytest.raises(StorageError, match="released"):
        second.check()
    with pytest.raises(StorageError, match="released"):
        second.write_note(2)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": "x", "session": -1}', "\x00" * 100, '{"pid": true}'])
def test_what_the_file_says_decides_nothing(path: Path, text: str) -> None:
    path.write_text(text)
    lock = ProcessLock.take(path)
    assert lock.previous == LockNote(None, None)
    path.write_text("")
    with pytest.raises(StoreLockedError, match="another process") as caught:
        ProcessLock.take(path)
    assert caught.value.holder_pid is None
    lock.write_note(None)
    assert json.loads(path.read_text()) == {"pid": os.getpid(), "session": None}
    lock.release()


def test_another_process_is_named_and_its_death_frees_the_lock(path: Path) -> None:
    """S42: refused with the holder's pid; the lock of a killed process does not block."""
    with process(HOLD + "print('held', flush=True); sys.stdin.read()", path) as holder:
        assert said(holder) == "held"
        with pytest.raises(StoreLockedError, match=f"process {holder.pid}") as caught:
            ProcessLock.take(path)
        assert caught.value.holder_pid == holder.pid
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        lock = ProcessLock.take(path)
        assert lock.previous == LockNote(holder.pid, 7)
        lock.release()


def test_a_fork_does_not_own_the_lock_and_its_parents_death_frees_it(path: Path) -> None:
    """S42: a fork is refused with the holder's pid, also by the lock object it inherited."""
    script = (
        HOLD
        + """
import os
from perdure.storage.errors import StoreLockedError
pid = os.fork()
if pid == 0:
    for use in (lock.check, lambda: lock.write_note(8), lambda: ProcessLock.take(Path(sys.argv[1]))):
        try:
            use()
        except StoreLockedError as error:
            assert error.holder_pid == os.getppid(), error
        else:
            raise AssertionError(use)
    assert lock.is_foreign
    lock.release()
    print(os.getpid(), flush=True)
sys.stdin.read()
"""
    )
    with process(script, path) as holder:
        child = int(said(holder))
        with pytest.raises(StoreLockedError, match=f"process {holder.pid}"):
            ProcessLock.take(path)
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # It still runs, and holds nothing.
        ProcessLock.take(path).release()


def test_a_file_that_was_replaced_meanwhile_is_not_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock
    path.write_text("old")

    def replace_once(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        path.unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replace_once)
    lock = ProcessLock.take(path)
    with pytest.raises(StoreLockedError):
        ProcessLock.take(path)
    lock.release()


def test_a_file_system_without_locks_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UnsupportedFileSystemError, match="not implemented"):
        ProcessLock.take(path)


def test_a_file_that_cannot_be_opened_is_named(path: Path) -> None:
    path.mkdir()
    with pytest.raises(StorageError, match=str(path)) as caught:
        ProcessLock.take(path)
    assert caught.value.path == str(path)
