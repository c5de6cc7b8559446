"""Ctrl-C at any line of what young workflows use: nobody waits for ever, and what was acknowledged is there.

A Ctrl-C is raised at each line in turn, as if it came from the terminal just then; Trio decides who gets it.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trio
from file_stores import opened, row

from perdure.storage import driver, filing, journal, rounds, young_driver
from perdure.storage.sqlite import CommitIn

OURS = {module.__file__ for module in (young_driver, journal, filing, rounds, driver)}
PATIENCE_S = 20


@contextmanager
def interrupted_at(number: int, passed: set[tuple[str, int]]) -> Generator[None, None, None]:
    """Ctrl-C at the line of ours that is met as the first of that number; those met before are noted."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in OURS:
            return None
        place = (name, frame.f_lineno)
        if event == "line" and place not in passed:
            passed.add(place)
            if len(passed) == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


async def life(data: Path, commit_in: CommitIn, number: int) -> tuple[bool, int]:
    """A workflow is made, and interrupted at the line of that number.

    Returns:
        Whether there were that many lines; and how many of its batches were acknowledged.
    """
    passed: set[tuple[str, int]] = set()
    acknowledged = 0
    with trio.fail_after(PATIENCE_S):
        async with opened(data, commit_in=commit_in) as store:
            driver, _ = await store.create_driver(row("order-1"))
            try:
                with interrupted_at(number, passed):
                    for _ in range(3):
                        await driver.set(b"key", b"%d" % (acknowledged + 1))
                        acknowledged += 1
                    await driver.aclose()
                await trio.lowlevel.checkpoint()
            except KeyboardInterrupt:
                pass
            await driver.aclose()
    return len(passed) >= number, acknowledged


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("commit_in", ["inline", "thread"])
def test_ctrl_c_at_any_line_leaves_nobody_waiting_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit_in: CommitIn, is_large: bool
) -> None:
    """S49: the driver and the store can be closed, and the next process finds each acknowledged batch."""
    if is_large:
        monkeypatch.setattr(young_driver, "JOURNALED_BYTES_MAX", 100)

    async def found(data: Path) -> int:
        async with opened(data) as store:
            driver = await store.open_driver("order-1")
            value = await driver.get(b"key")
            await driver.aclose()
            return int(value or b"0")

    for number in itertools.count(1):
        data = tmp_path / str(number)
        is_met, acknowledged = trio.run(life, data, commit_in, number)
        if not is_met:
            assert acknowledged == 3
            assert number > 50
            return
        assert trio.run(found, data) in (acknowledged, acknowledged + 1), number
