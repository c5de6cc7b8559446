"""S49, with real signals to a real process: one ends in order, two faster, three at once, on every face of a supervisor."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from perdure.actors import open_supervisor
from perdure.workflow import WorkflowState

PROGRAM = Path(__file__).with_name("program.py")
PATIENCE_S = 30

each_face = pytest.mark.parametrize("face", ["trio", "blocking", "asyncio"])


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))


class Program:
    """The program, running.

    Args:
        process: It.
        told: A file descriptor that has a byte for each signal that has come to it.
    """

    def __init__(self, process: subprocess.Popen[str], told: int) -> None:
        self._process = process
        self._told = told

    def send(self, number: signal.Signals) -> None:
        """Send a signal, and see that it comes; without that the next one may come in its place."""
        self._process.send_signal(number)
        readable, _, _ = select.select([self._told], [], [], PATIENCE_S)
        assert readable, "the signal has come to the program"
        os.read(self._told, 1)

    def stays(self, seconds: float = 0.5) -> None:
        """Check that it does not end for a while."""
        with pytest.raises(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def finish(self) -> tuple[int, str, str]:
        """What it ends with, and what it said."""
        try:
            out, err = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # its threads' stacks come on stderr
            out, err = self._process.communicate()
            pytest.fail(f"it did not end; it said {out!r}, and:\n{err}")
        return self._process.returncode, out, err


@contextmanager
def running(directory: Path, mode: str, face: str) -> Iterator[Program]:
    """The program, ready."""
    # In its development mode asyncio says on stderr how long its callbacks took, which is the machine's business.
    strict = ["-X", "faulthandler", "-W", "error"] if face == "asyncio" else ["-X", "dev", "-W", "error"]
    told, tells = os.pipe()
    command = [sys.executable, *strict, str(PROGRAM), str(directory), mode, face, str(tells)]
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[tells]
        ) as process:
            try:
                os.close(tells)
                assert process.stdout is not None
                seen = ""
                while (line := process.stdout.readline()) != "ready\n":
                    assert line, f"it ended: {seen}{process.stderr and process.stderr.read()}"
                    seen += line
                yield Program(process, told)
            finally:
                process.kill()
    finally:
        os.close(told)


async def resume(directory: Path, mode: str) -> list[Any]:
    """What a next process makes of it: the results, and that nothing is locked or in trouble."""
    from program import SECONDS, WORKFLOWS

    SECONDS[mode] = 0.0
    async with open_supervisor(directory, WORKFLOWS) as supervisor:
        handle = await supervisor.get("waiter-1")
        await handle.message("go", "gone")
        results = [await handle.result(), await (await supervisor.get("worker-1")).result()]
        assert supervisor.troubles() == {}
        return results


class TestFirst:
    """Asked to end, a program ends in order."""

    @each_face
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    async def test_a_handled_signal_ends_in_order_with_its_status(
        self, tmp_path: Path, number: signal.Signals, face: str
    ) -> None:
        with running(tmp_path / "data", "quick-handled", face) as program:
            program.send(number)
            status, _, err = program.finish()
        assert (status, err) == (128 + number, "")
        assert await resume(tmp_path / "data", "quick") == ["gone", "quick"]

    @each_face
    async def test_the_running_step_finishes_and_no_other_begins(
        self, tmp_path: Path, face: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with running(tmp_path / "data", "quick-handled", face) as program:
            program.send(signal.SIGTERM)
            _, out, _ = program.finish()
        assert out in ("done\n", ""), "unless it was done before"
        await resume(tmp_path / "data", "quick")
        assert capsys.readouterr().out == ("next\n" if out else ""), "it was recorded, and did not run again"

    @pytest.mark.parametrize("delay_s", [0.0, 0.011, 0.023, 0.037])
    async def test_ctrl_c_amid_work_comes_out_as_itself_wherever_it_lands(self, tmp_path: Path, delay_s: float) -> None:
        with running(tmp_path / "data", "busy-raised", "trio") as program:
            await trio.sleep(delay_s)
            program.send(signal.SIGINT)
            status, _, err = program.finish()
        assert (status, err) == (130, "")
        await check_spinners(tmp_path / "data")

    @each_face
    async def test_ctrl_c_while_many_are_at_work_ends_in_order(self, tmp_path: Path, face: str) -> None:
        with running(tmp_path / "data", "busy-raised", face) as program:
            program.send(signal.SIGINT)
            status, _, err = program.finish()
        assert (status, err) == (130, "")
        await check_spinners(tmp_path / "data")


async def check_spinners(directory: Path) -> None:
    from program import spinner

    async with open_supervisor(directory, [spinner], grace=0) as supervisor:
        await trio.sleep(0.1)
        assert supervisor.troubles() == {}
        for number in range(20):
            handle = await supervisor.get(f"spinner-{number}")
            assert await handle.get_state() is WorkflowState.RUNNING


class TestSecond:
    """Pressed again, it ends faster, and in order all the same."""

    @each_face
    @pytest.mark.parametrize("how", ["handled", "raised"])
    async def test_it_does_not_wait_for_grace(self, tmp_path: Path, how: str, face: str) -> None:
        with running(tmp_path / "data", f"slow-{how}", face) as program:
            program.send(signal.SIGINT)
            program.stays()
            began = time.monotonic()
            program.send(signal.SIGINT)
            status, out, err = program.finish()
            assert time.monotonic() - began < 20, "of 60 seconds of grace"
        assert (status, out, err) == (130, "", "")
        assert await resume(tmp_path / "data", "slow") == ["gone", "slow"]

    @each_face
    async def test_a_step_that_cannot_be_cut_short_is_waited_for_and_recorded(
        self, tmp_path: Path, face: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """S20: nor does that end in a group of exceptions, however often somebody presses."""
        presses = 3 if face == "trio" else 2
        with running(tmp_path / "data", "lingering-raised", face) as program:
            for _ in range(presses):
                program.send(signal.SIGINT)
                program.stays(0.2)
            status, out, err = program.finish()
        assert (status, out, err) == (130, "done\n", "")
        assert await resume(tmp_path / "data", "lingering") == ["gone", "lingering"]
        assert capsys.readouterr().out == "next\n", "it was recorded"


class TestThird:
    """Pressed once more, a program that handles signals ends here and now; nothing that was acknowledged is lost."""

    @each_face
    async def test_a_step_that_ignores_everything_is_ended_by_it(self, tmp_path: Path, face: str) -> None:
        with running(tmp_path / "data", "stubborn-handled", face) as program:
            program.send(signal.SIGTERM)
            program.stays()
            program.send(signal.SIGTERM)
            program.stays()
            program.send(signal.SIGTERM)
            status, out, err = program.finish()
        assert (status, out, err) == (143, "", "")
        assert await resume(tmp_path / "data", "stubborn") == ["gone", "stubborn"]

    @each_face
    async def test_a_step_that_computes_without_end_is_ended_by_it(self, tmp_path: Path, face: str) -> None:
        """Its program's loop stands still meanwhile."""
        with running(tmp_path / "data", "hot-handled", face) as program:
            for _ in range(2):
                program.send(signal.SIGTERM)
                program.stays()
            program.send(signal.SIGTERM)
            status, _, err = program.finish()
        assert (status, err) == (143, "")
        assert await resume(tmp_path / "data", "hot") == ["gone", "hot"]

    async def test_with_a_portal_a_third_ctrl_c_ends_the_program_too(self, tmp_path: Path) -> None:
        """It gives up waiting for the portal's thread, which ends with the process."""
        with running(tmp_path / "data", "stubborn-raised", "blocking") as program:
            for _ in range(2):
                program.send(signal.SIGINT)
                program.stays()
            program.send(signal.SIGINT)
            status, out, err = program.finish()
        assert (status, out, err) == (130, "", "")
        assert await resume(tmp_path / "data", "stubborn") == ["gone", "stubborn"]
