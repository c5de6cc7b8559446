"""A user who writes `async def test_x(): await explore_crashes(order, {...})` needs nothing else, whatever plugins there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SHOP = '''
"""A shop."""

from perdure.testing import EffectLedger
from perdure.workflow import Context, current_step, workflow

bank = EffectLedger("bank")


def charge(cents: int) -> str:
    return bank.record("charge", cents, key=current_step().idempotency_key, returns="pay-1")


def charge_carelessly(cents: int) -> str:
    return bank.record("charge", cents, returns="pay-1")


@workflow
async def order(ctx: Context, cents: int) -> str:
    return await ctx.step("charge", charge, cents)


@workflow
async def careless(ctx: Context, cents: int) -> str:
    return await ctx.step("charge", charge_carelessly, cents)
'''

PLAIN = """
from perdure.testing import explore_crashes
from shop import careless, order


async def test_right() -> None:
    await explore_crashes(order, 1999)


async def test_wrong() -> None:
    await explore_crashes(careless, 1999)
"""

ALONE = """
import trio
from hypothesis import given, settings, strategies as st

import shop
from perdure.testing import SimulatedDisk, virtual_supervisor
from shop import bank, order


async def test_a_year_of_virtual_time(simulated_disk, simulated_clock) -> None:
    begun = simulated_clock.now_ms()
    async with virtual_supervisor([order], disk=simulated_disk, clock=simulated_clock) as supervisor:
        assert await (await supervisor.spawn(order, "w", 5)).result() == "pay-1"
        await trio.sleep(365 * 86400)
    assert simulated_clock.now_ms() - begun >= 365 * 86400 * 1000
    assert bank.count("charge") == 1


def test_the_world_is_empty_again() -> None:
    assert bank.count() == 0
    bank.record("charge")


async def test_and_again() -> None:
    assert bank.count() == 0


examples = []


@settings(max_examples=5, database=None, deadline=None)
@given(cents=st.integers(1, 100))
async def test_under_hypothesis(cents: int) -> None:
    await trio.sleep(3600)
    async with virtual_supervisor([order]) as supervisor:
        await (await supervisor.spawn(order, "w", cents)).result()
    examples.append(cents)


def test_it_ran() -> None:
    assert examples


class TestInAClass:
    async def test_method(self) -> None:
        await trio.sleep(3600)
"""

OTHERS = """
async def test_of_something_else() -> None:
    import asyncio
    await asyncio.sleep(0)


def test_nothing_of_it_was_loaded() -> None:
    import sys
    assert [name for name in sys.modules if name.startswith("perdure.") and name != "perdure.testing.plugin"] == [
        "perdure.testing"
    ]
    assert "trio" not in sys.modules
"""


def run_pytest(directory: Path, *arguments: str, strict: bool = True, **files: str) -> tuple[dict[str, int], str]:
    """Run pytest in a project of nothing but these files; how many tests ended how, and what it printed."""
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *(["-W", "error"] if strict else []),
        *arguments,
    ]
    run = subprocess.run(
        command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    last = run.stdout.strip().splitlines()[-1]
    counts = {
        what.rstrip("s"): int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
    }
    return counts, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("plugins", "marker"),
    [
        (["no:trio", "no:anyio"], ""),
        (["no:anyio"], ""),
        (["no:trio"], "import pytest\npytestmark = pytest.mark.anyio\n"),
        (["no:anyio"], "import pytest\npytestmark = pytest.mark.trio\n"),
    ],
    ids=["no plugin", "pytest-trio unasked", "anyio on both loops", "pytest-trio"],
)
def test_an_exploration_needs_nothing_else(tmp_path: Path, plugins: list[str], marker: str) -> None:
    """S39: in an empty project, without any configuration, the planted bug is found and its story told."""
    options = [argument for plugin in plugins for argument in ("-p", plugin)]
    counts, printed = run_pytest(tmp_path, *options, shop=SHOP, test_shop=marker + PLAIN)
    times = 2 if "anyio" in marker else 1  # asyncio, and trio
    assert counts == {"passed": times, "failed": times}, printed
    assert "bank: charge 1999 happened twice; without a crash, once" in printed
    assert re.search(r'await explore_crashes\(careless, 1999, only="\d+/before@seed0"\)', printed)
    assert "explorer.py" not in printed, "the kit's own frames are in the traceback"


def test_what_the_plugin_gives(tmp_path: Path) -> None:
    counts, printed = run_pytest(tmp_path, "-p", "no:trio", "-p", "no:anyio", shop=SHOP, test_alone=ALONE)
    assert counts == {"passed": 6}, printed


def test_others_are_left_alone(tmp_path: Path) -> None:
    """What uses Perdure nowhere fails as it would without the plugin, and nothing is loaded for it."""
    counts, printed = run_pytest(
        tmp_path, "-p", "no:trio", "-p", "no:anyio", "-p", "no:hypothesispytest", test_others=OTHERS
    )
    assert counts == {"failed": 1, "passed": 1}, printed
    assert "async def functions are not natively supported" in printed


LEAVING = """
import trio
from perdure.testing import RecoveryDiffersError, explore_crashes, run_virtual, virtual_supervisor
from perdure.workflow import workflow

import pytest

CACHE = {}
count = 0
LIMIT = 3


@workflow
async def forgetful(ctx, _):
    async def load():
        global count
        count += 1
        CACHE["x"] = 5

    await ctx.step("load", load)
    await ctx.sleep("a-while", 60)
    async def use():
        return [CACHE.get("x"), count]
    return await ctx.step("use", use)


@pytest.mark.parametrize("number", range(2))
async def test_an_ordinary_one(number, monkeypatch) -> None:
    monkeypatch.setattr("test_leaving.LIMIT", 5)
    for _ in range(2):
        async with virtual_supervisor([forgetful]) as supervisor:
            await (await supervisor.spawn(forgetful, "w")).result()
    assert (CACHE, count) == ({"x": 5}, 2)


async def test_the_exploration_finds_it_all_the_same() -> None:
    assert (CACHE, count, LIMIT) == ({}, 0, 3)
    with pytest.raises(RecoveryDiffersError):
        await explore_crashes(forgetful)
    assert (CACHE, count) == ({}, 0)


async def test_what_was_set_again_stays(number=1) -> None:
    async with virtual_supervisor([forgetful]) as supervisor:
        await (await supervisor.spawn(forgetful, "w")).result()
    CACHE["x"] = 6


def test_it_stayed() -> None:
    assert CACHE == {"x": 6}
"""

UNAWAITED = """
from perdure.testing import explore_crashes
from shop import careless


async def test_wrong() -> None:
    explore_crashes(careless, 1999)
"""


def test_globals_that_a_test_leaves_hide_nothing_from_the_next(tmp_path: Path) -> None:
    """S39: what a process kept in a global only is found, whatever ran before; a test still sees what its blocks did."""
    counts, printed = run_pytest(tmp_path, "-p", "no:trio", "-p", "no:anyio", test_leaving=LEAVING)
    assert counts == {"passed": 5}, printed


def test_an_exploration_that_is_never_awaited_fails_its_test(tmp_path: Path) -> None:
    """S39: it explored nothing, so it must not pass; with warnings as they are without configuration."""
    counts, printed = run_pytest(
        tmp_path, "-p", "no:trio", "-p", "no:anyio", strict=False, shop=SHOP, test_shop=UNAWAITED
    )
    assert counts.get("passed", 0) == 0, printed
    assert "coroutine 'explore_crashes' was never awaited" in printed
