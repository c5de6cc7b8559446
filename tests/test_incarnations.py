"""The count of simulated processes: what counts, what is printed, and that too few make a run red."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from incarnations import Tally, has_history, kinds_in

from perdure.actors import Supervisor
from perdure.storage import Batch, MemoryDriver, layout
from perdure.testing import CrashPoint, FaultyDriver, Simulation
from perdure.workflow import Context, run_workflow

pytest_plugins = ["pytester"]

SAMPLE = """
import trio
from perdure.storage import MemoryDriver
from perdure.testing import CrashPoint, FaultyDriver, SimulatedCrash
from perdure.workflow import run_workflow

async def work():
    return 1

async def flow(ctx, _):
    await ctx.step("one", work)
    await ctx.sleep("nap", 0)
    await ctx.step("two", work)

async def main(data, *point):
    driver = FaultyDriver(MemoryDriver(data), crash_at=CrashPoint(*point) if point else None)
    try:
        await run_workflow("w", flow, None, driver)
    except SimulatedCrash:
        pass
    return len(driver.writes)

def test_every_write():
    counted = trio.run(main, {})
    for write in range(counted):
        for when in ("before", "after"):
            trio.run(main, {}, write, when)

def test_one():
    trio.run(main, {}, 1, "after")
"""
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest on a test module, in another process: there is one count in each."""
    spec = importlib.util.find_spec("incarnations")
    assert spec is not None
    assert spec.origin is not None
    monkeypatch.setenv("PYTHONPATH", str(Path(spec.origin).parent))

    def run_pytest(*args: str) -> pytest.RunResult:
        pytester.makepyfile(test_sample=SAMPLE)
        return pytester.runpytest_subprocess("-p", "incarnations", "-p", "no:cacheprovider", *args)

    return run_pytest


def test_deaths_are_counted_and_written_down(run: Run, pytester: pytest.Pytester) -> None:
    """S39: the figures add up, and enough of them are green."""
    result = run("--incarnations=4", "--incarnations-file=out/figures.json")
    assert result.ret == pytest.ExitCode.OK
    figures = json.loads((pytester.path / "out" / "figures.json").read_text())
    assert figures["files"] == {"test_sample.py": figures["incarnations"]}
    assert figures["incarnations"] >= 4
    assert figures["killed_before_new_history"] >= 2, "before the first write and after the birth"
    assert set(figures["histogram"]) >= {"step", "sleep"}
    assert figures["histogram"]["step"]["again"] == 0
    result.stdout.fnmatch_lines(
        [f"{figures['incarnations']} simulated processes killed after they had made new history*"]
    )


def test_the_deaths_of_all_workers_are_added_up_and_too_few_are_red(run: Run, pytester: pytest.Pytester) -> None:
    """S39: under pytest-xdist each test ran in one worker of two, and the controller has the sum."""
    result = run(
        "--incarnations=1000", "--incarnations-file=figures.json", "-n", "2", "--dist", "each", "--tx", "2*popen"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*fewer than the 1,000*"])
    figures = json.loads((pytester.path / "figures.json").read_text())
    assert figures["incarnations"] >= 8, "both workers ran all"
    assert figures["incarnations"] % 2 == 0


async def test_what_counts_as_history_and_what_a_batch_is_about() -> None:
    """S39: entries, their metadata and the end; not the birth, the mailbox, or a state."""
    driver = FaultyDriver(MemoryDriver({}))

    async def work() -> int:
        return 1

    async def flow(ctx: Context, _: None) -> int:
        await ctx.step("one", work)
        await ctx.sleep("nap", 0)
        return 1

    await run_workflow("w", flow, None, driver)
    batches = [write.batch for write in driver.writes if write.batch is not None]
    about = [kinds_in(batch) for batch in batches]
    assert {"step"} in about
    assert any("end" in kinds for kinds in about)
    assert has_history(batches)
    assert not has_history([Batch(puts=[(layout.STATE_KEY, b"running"), (layout.INPUT_KEY, b"")])])
    assert kinds_in(Batch(puts=[(layout.STATE_KEY, b"running"), (layout.INPUT_KEY, b"")])) == {"birth"}
    assert kinds_in(Batch(puts=[(layout.MAILBOX_PREFIX + b"1", b"")])) == {"mailbox"}
    assert kinds_in(Batch()) == {"bookkeeping"}


def test_a_process_of_the_kit_that_dies_in_its_recovery_is_told_from_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S39: on one disk, the second death is one again."""
    seen = Tally()
    monkeypatch.setattr("incarnations.tally", seen)

    async def work() -> int:
        return 1

    async def flow(ctx: Context, _: None) -> int:
        return await ctx.step("one", work) + await ctx.step("two", work)

    async def begin(supervisor: Supervisor) -> None:
        await (await supervisor.spawn(flow, "w", None)).result()

    def columns() -> set[str]:
        return {column for _, column in seen.cells}

    first = 0
    while not seen.counted:
        simulation = Simulation([flow])
        assert simulation.run(begin, crash_at=CrashPoint(first, "after")).has_crashed
        first += 1
    assert seen.early == first - 1 >= 1
    assert columns() == {"after"}
    second = 0
    while seen.counted == 1:
        assert simulation.run(begin, crash_at=CrashPoint(second, "after")).has_crashed
        second += 1
    assert columns() == {"after", "again"}


def test_a_tally_survives_its_trip_to_the_controller() -> None:
    one = Tally(3, 2, 1, 7)
    one.cells["step", "before"] += 3
    one.files["tests/a.py"] += 3
    total = Tally()
    total.add(Tally.unpack(json.loads(json.dumps(one.pack()))))
    total.add(one)
    assert (total.counted, total.early, total.between, total.write_points) == (6, 4, 2, 14)
    assert total.report()["histogram"] == {"step": {"before": 6, "after": 0, "again": 0}}
