"""Logging: quiet unless configured, and every record about a workflow carries the fields that say about which."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk
from harness import DriverKind, Namespace, host
from trio.testing import MockClock

from perdure.workflow import (
    Context,
    CriticalError,
    RollbackContext,
    RunMode,
    WorkflowFailedError,
    current_step,
    workflow,
)

ROOT = Path(__file__).resolve().parents[1]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a logger in the three layers, and where it is."""
    for layer in ("storage", "workflow", "actors"):
        for path in sorted((ROOT / layer).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id="_log"), attr=level)) if level in LEVELS:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_what_is_logged_about_a_workflow_or_a_schedule_says_about_which() -> None:
    found = list(calls())
    assert len(found) > 20
    for where, call in found:
        text = " ".join(
            node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant) and type(node.value) is str
        )
        if "workflow %r" in text or "schedule %r" in text:
            assert "extra" in {keyword.arg for keyword in call.keywords}, f"{where}: {text}"


def test_all_loggers_are_below_perdure() -> None:
    for layer in ("storage", "workflow", "actors"):
        for path in sorted((ROOT / layer).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "getLogger"
                ):
                    (name,) = node.args
                    assert isinstance(name, ast.Constant), path
                    assert str(name.value).split(".")[0] == "perdure", path


def test_without_configuration_nothing_is_output() -> None:
    program = """
import trio
from perdure.storage import MemoryDriver
from perdure.workflow import Context, WorkflowFailedError, run_workflow

async def broken(ctx: Context, input: None) -> None:
    ctx.logger.error("about to fail")
    raise ValueError("broken")

async def main() -> None:
    try:
        await run_workflow("w-1", broken, None, MemoryDriver())
    except WorkflowFailedError:
        print("failed")

trio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("failed\n", "")


FIELDS = ("workflow_id", "workflow", "entry", "attempt")


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged below `perdure`, from DEBUG on."""
    caplog.set_level(logging.DEBUG, "perdure")
    return caplog


def told(logged: pytest.LogCaptureFixture, text: str) -> list[dict[str, Any]]:
    """The fields of the records with this text in them, each with its level."""
    return [
        {field: getattr(record, field) for field in FIELDS if hasattr(record, field)} | {"level": record.levelname}
        for record in logged.records
        if text in record.getMessage()
    ]


async def shaky() -> str:
    if current_step().attempt < 3:
        raise OSError("not yet")
    return "done"


async def reserve() -> str:
    return "reserved"


async def undo(ctx: RollbackContext, output: str) -> None:
    ctx.logger.info("undoing %s", output)


async def fail() -> None:
    raise CriticalError("out of stock")


ID = {"workflow_id": "workflow-1", "workflow": "order"}


@workflow(name="order")
async def order(ctx: Context, input: None) -> None:
    """Retries, then fails and is rolled back."""
    ctx.logger.info("top")

    async def block(ctx: Context) -> None:
        ctx.logger.info("inside", extra={"attempt": 7})
        await ctx.step("shaky", shaky)

    await ctx.try_block("block", block)
    await ctx.rollback_checkpoint("begin")
    await ctx.step("reserve", reserve, rollback=undo)
    await ctx.step("charge", fail)


async def test_records_of_a_life_say_of_which_workflow_which_entry_and_which_attempt(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, records: pytest.LogCaptureFixture
) -> None:
    """S35, S37: each once, also where the workflow is run again."""
    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError):
            await process.finish(order)
        await process.restart()
        with pytest.raises(WorkflowFailedError):
            await process.finish(order)
    entry = ("block", "shaky")
    assert told(records, "will be retried") == [
        {**ID, "entry": entry, "attempt": 1, "level": "INFO"},
        {**ID, "entry": entry, "attempt": 2, "level": "INFO"},
    ]
    assert told(records, "failed for good") == [{**ID, "entry": ("charge",), "attempt": 1, "level": "INFO"}]
    assert told(records, "failed, and is rolled back") == [{**ID, "level": "WARNING"}]
    assert told(records, "was rolled back") == [{**ID, "level": "INFO"}]
    assert told(records, "top") == [{**ID, "level": "INFO"}]
    assert told(records, "inside") == [{**ID, "entry": ("block",), "attempt": 7, "level": "INFO"}]
    assert told(records, "undoing") == [{**ID, "entry": ("reserve",), "attempt": 1, "level": "INFO"}]


async def test_a_supervisor_tells_of_each_end(
    driver_kind: DriverKind, tmp_path: Path, autojump_clock: MockClock, records: pytest.LogCaptureFixture
) -> None:
    """S32, S36, S41."""

    @workflow(name="waiter")
    async def waiter(ctx: Context, input: None) -> None:
        await ctx.queue.next("go")

    @workflow(name="broken")
    async def broken(ctx: Context, input: None) -> None:
        await ctx.queue.next("")

    disk = Disk(driver_kind, tmp_path)
    async with disk.process(waiter, broken) as supervisor:
        for workflow_id in ("w-1", "w-2"):
            handle = await supervisor.spawn(waiter, workflow_id)
        await handle.cancel()
        handle = await supervisor.get("w-1")
        await handle.message("go")
        await handle.result()
        await supervisor.spawn(broken, "b-1")
        await trio.sleep(1)
    assert told(records, "completed") == [{"workflow_id": "w-1", "workflow": "waiter", "level": "INFO"}]
    assert told(records, "was cancelled") == [{"workflow_id": "w-2", "workflow": "waiter", "level": "INFO"}]
    (stopped,) = [found for found in told(records, "must not be empty") if found["level"] == "WARNING"]
    assert stopped == {"workflow_id": "b-1", "workflow": "broken", "level": "WARNING"}
    assert len(told(records, "is activated")) >= 2
