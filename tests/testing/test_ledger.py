"""The outside world as tests see it: effects are counted, keys are known, and it fails as it is told to."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context as Variables
from contextvars import copy_context
from itertools import cycle
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from perdure.actors import Supervisor
from perdure.testing import (
    CrashPoint,
    Effect,
    EffectKeyError,
    EffectLedger,
    EffectRefusedError,
    EffectThreadError,
    EffectTimeoutError,
    Incarnation,
    SimulatedCrash,
    SimulatedDisk,
    Simulation,
    explore_crashes,
    run_virtual,
    virtual_supervisor,
)
from perdure.testing.ledger import forget_effects, ledgers_of
from perdure.testing.strays import watching
from perdure.workflow import Context, InvalidArgumentError, StepInterruptedError, current_step, workflow

bank = EffectLedger("bank")


async def charge(cents: int) -> str:
    return str(bank.record("charge", cents, returns="pay-1"))


def charge_once(cents: int) -> str:
    return str(bank.record("charge", cents, key=current_step().idempotency_key, returns="pay-1"))


@workflow
async def careless(ctx: Context, cents: int) -> str:
    return await ctx.step("charge-card", charge, cents)


@workflow
async def careful(ctx: Context, cents: int) -> str:
    return await ctx.step("charge-card", charge_once, cents)


async def pay_carelessly(supervisor: Supervisor) -> str:
    return await (await supervisor.spawn(careless, "w", 1999)).result()


async def pay_carefully(supervisor: Supervisor) -> str:
    return await (await supervisor.spawn(careful, "w", 1999)).result()


_looks = cycle([1, 1.0])


async def charge_changingly(_: int) -> str:
    return str(bank.record("charge", next(_looks), returns="pay-1"))


@workflow
async def changing(ctx: Context, cents: int) -> str:
    return await ctx.step("charge-card", charge_changingly, cents)


async def pay_changingly(supervisor: Supervisor) -> str:
    return await (await supervisor.spawn(changing, "w", 1999)).result()


def last_write(process: object) -> int:
    """At which write the step's outcome is recorded."""
    assert callable(process)
    writes = Simulation([careless, careful, changing]).run(process).writes
    return next(
        each.number
        for each in writes
        if each.batch is not None and any(b"pay-1" in value for _, value in each.batch.puts)
    )


def test_a_crash_between_an_effect_and_its_record_repeats_it() -> None:
    """S22, S39: at least once; the ledger tells which effect, where, and by which process."""
    simulation = Simulation([careless])
    simulation.run(pay_carelessly, crash_at=CrashPoint(last_write(pay_carelessly), "before"))
    assert bank.count("charge") == 1
    assert simulation.run(pay_carelessly).value == "pay-1"
    first, second = bank.effects
    assert (first.name, first.content, first.key, first.workflow_id, first.path) == (
        "charge",
        1999,
        None,
        "w",
        ("charge-card",),
    )
    assert (first.process, second.process) == (0, 1)
    assert bank.repeated == (second,)
    assert ledgers_of(simulation.disk) == (bank,)


def test_with_a_key_it_is_one_effect_and_the_first_result_comes_back() -> None:
    """S39"""
    simulation = Simulation([careful])
    simulation.run(pay_carefully, crash_at=CrashPoint(last_write(pay_carefully), "before"))
    assert simulation.run(pay_carefully).value == "pay-1"
    assert (bank.count(), bank.attempts, bank.attempts_of("charge"), bank.repeated) == (1, 2, 2, ())


def test_each_disk_is_a_world_of_its_own() -> None:
    forget_effects()
    bank.record("outside of any")
    for _ in range(2):
        Simulation([careless]).run(pay_carelessly)
        assert [effect.name for effect in bank.effects] == ["charge"]
    first = Simulation([careless])
    first.run(pay_carelessly)
    bank.clear()
    assert (bank.effects, [effect.name for effect in bank.effects_on(first.disk)]) == ((), ["charge"])
    bank.show(first.disk)
    assert bank.count() == 1


def test_outside_of_a_simulation_there_is_one_world_until_it_is_forgotten() -> None:
    forget_effects()
    ledger = EffectLedger("post")
    for _ in range(2):
        ledger.record("letter", "to me")
    assert (ledger.count("letter"), ledger.count("parcel"), ledger.repeated) == (2, 0, ())
    assert ledger.effects[0] == Effect("letter", "to me", None, None, (), 0, 0, 0)
    assert not ledger.effects[0].is_in_step
    forget_effects()
    assert (ledger.count(), ledger.attempts) == (0, 0)


async def test_a_dead_process_has_no_effects(autojump_clock: MockClock) -> None:
    """S39: neither in what still unwinds, nor in what shields itself."""
    disk = SimulatedDisk()
    refused: list[str] = []
    async with virtual_supervisor([careless], disk=disk) as supervisor:
        await pay_carelessly(supervisor)
        disk.crash()
        try:
            await trio.sleep_forever()
        finally:
            with pytest.raises(SimulatedCrash):
                bank.record("refund")
            with trio.CancelScope(shield=True), pytest.raises(SimulatedCrash):
                await bank.perform("refund", seconds=5)
            refused.append("refund")
    assert refused
    assert [effect.name for effect in bank.effects] == ["charge"]


@pytest.mark.parametrize(
    ("faults", "happened", "raised"),
    [
        ({0: "refused"}, ["b"], [EffectRefusedError, None]),
        ({1: "lost"}, ["a"], [None, EffectTimeoutError]),
        ({1: "applied"}, ["a", "b"], [None, EffectTimeoutError]),
        ({"b": "applied"}, ["a", "b"], [None, EffectTimeoutError]),
        ({("a", 0): "refused"}, ["b"], [EffectRefusedError, None]),
        ({("a", 1): "refused"}, ["a", "b"], [None, None]),
    ],
)
def test_it_fails_where_it_is_told_to(faults: object, happened: object, raised: object) -> None:
    ledger = EffectLedger("bank", faults=faults)  # type: ignore[arg-type]

    def ask(name: str) -> object:
        try:
            ledger.record(name)
        except (EffectRefusedError, EffectTimeoutError) as error:
            return type(error), error.ledger, error.effect
        return None

    expected = [kind and (kind, "bank", name) for name, kind in zip("ab", raised, strict=True)]  # type: ignore[call-overload]
    assert [ask(name) for name in "ab"] == expected
    assert [effect.name for effect in ledger.effects] == happened
    assert ledger.attempts == 2


def test_what_timed_out_after_it_acted_is_done_once_when_it_is_asked_for_again() -> None:
    ledger = EffectLedger(faults={"charge": "applied"})
    with pytest.raises(TimeoutError, match="did not answer charge in time"):
        ledger.record("charge", 5, key="k", returns="receipt")
    assert ledger.record("charge", 5, key="k", returns="another") == "receipt"
    assert (ledger.count(), ledger.attempts) == (1, 2)


def test_a_key_is_good_for_one_effect_only() -> None:
    ledger = EffectLedger("bank")
    ledger.record("charge", 5, key="k")
    with pytest.raises(EffectKeyError, match="with the key of charge 5") as caught:
        ledger.record("charge", 6, key="k")
    assert (caught.value.ledger, caught.value.effect, caught.value.key) == ("bank", "charge", "k")
    with pytest.raises(EffectKeyError, match="one key for one effect"):
        ledger.record("refund", 5, key="k")
    assert ledger.count() == 1


def test_with_a_key_content_that_is_like_no_other_is_told_as_that() -> None:
    """Else each attempt of a step would be told to use another key, when its key is right."""
    bank.record("charge", object(), key="k")
    with pytest.raises(EffectKeyError, match="record what it holds"):
        bank.record("charge", object(), key="k")


def test_what_was_repeated_is_known_by_equality() -> None:
    """However it looks, in this process or another."""
    at = CrashPoint(last_write(pay_changingly), "before")
    simulation = Simulation([changing])
    simulation.run(pay_changingly, crash_at=at)
    simulation.run(pay_changingly)
    first, second = bank.effects
    assert repr(first.content) != repr(second.content)
    assert bank.repeated == (second,)


def test_a_service_that_takes_a_while_acts_half_way() -> None:
    ledger = EffectLedger("bank")

    async def main(patience_s: float) -> object:
        with trio.move_on_after(patience_s):
            return await ledger.perform("charge", 5, returns="receipt", seconds=10)
        return "gave up"

    assert [run_virtual(main, patience_s) for patience_s in (11, 7, 3)] == ["receipt", "gave up", "gave up"]
    assert ledger.count() == 2


def heard_by_nobody(*contexts: Variables) -> None:
    """Charge in a thread of its own, which keeps what goes wrong to itself."""

    def pay() -> None:
        with suppress(EffectThreadError):
            bank.record("charge", 5, key="of-the-step")

    (context,) = contexts or (Variables(),)
    thread = threading.Thread(target=context.run, args=(pay,))
    thread.start()
    thread.join()


def in_an_executor() -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(bank.record, "charge", 5).result()


def with_the_context() -> None:
    heard_by_nobody(copy_context())


@workflow
async def paying_in_threads(ctx: Context, how: str) -> None:
    await ctx.step("pay", {"thread": heard_by_nobody, "executor": in_an_executor, "copy": with_the_context}[how])


@pytest.mark.parametrize("how", ["thread", "executor"])
async def test_an_effect_of_a_thread_that_knows_of_no_run_fails_the_exploration(how: str) -> None:
    """S39: it is not lost, whoever heard what the thread raised."""
    with pytest.raises(EffectThreadError, match=r"contextvars\.copy_context\(\)\.run") as caught:
        await explore_crashes(paying_in_threads, how)
    assert (caught.value.ledger, caught.value.effect) == ("bank", "charge")
    assert bank.attempts == 0


async def test_a_thread_with_the_context_of_its_step_has_effects_like_it() -> None:
    """S39"""
    explored = await explore_crashes(paying_in_threads, "copy")
    (effect,) = explored.first.effects["bank"]
    assert (effect.content, effect.workflow_id, effect.path) == (5, "paying_in_threads-1", ("pay",))


async def test_an_effect_of_a_thread_that_knows_of_no_process_fails_the_block(autojump_clock: MockClock) -> None:
    """S39"""
    with pytest.raises(EffectThreadError):
        async with virtual_supervisor([paying_in_threads]) as supervisor:
            await (await supervisor.spawn(paying_in_threads, "w", "thread")).result()


def test_an_effect_between_two_processes_fails_them() -> None:
    """S39: of a thread that outlived the first."""

    async def process(supervisor: Supervisor) -> None:
        await pay_carefully(supervisor)

    class Late(Simulation):
        def run(self, *args: object, **arguments: object) -> Incarnation[None]:  # type: ignore[override]
            heard_by_nobody()
            return super().run(*args, **arguments)  # type: ignore[arg-type]

    with pytest.raises(EffectThreadError):
        Late([careful]).run_to_end(process)


async def test_what_goes_on_beside_a_simulation_is_outside_of_it(autojump_clock: MockClock) -> None:
    """As a test's own stand-in for a service does, in a task or in the main thread."""
    ledger, asked = EffectLedger("service"), trio.Event()

    async def serve() -> None:
        await asked.wait()
        ledger.record("served")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with virtual_supervisor([careful]) as supervisor:
            await pay_carefully(supervisor)
            asked.set()
            await trio.sleep(1)
    assert ledger.count("served") == 1


def test_without_a_simulation_any_thread_has_effects() -> None:
    in_an_executor()
    heard_by_nobody()
    assert bank.count("charge") == 2


def test_a_thread_that_runs_a_simulation_is_outside_before_and_after_it() -> None:
    def work() -> int:
        ledger = EffectLedger("of the thread")
        with watching():
            ledger.record("before")
            Simulation([careful]).run(pay_carefully)
            ledger.record("after")
        return ledger.count()

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(work).result() == 2


def test_errors_survive_pickling() -> None:
    for kind in (EffectRefusedError, EffectTimeoutError):
        again = pickle.loads(pickle.dumps(kind("told to", ledger="bank", effect="charge")))
        assert (type(again), str(again), again.ledger, again.effect) == (kind, "told to", "bank", "charge")


def test_bad_arguments_say_what_to_write() -> None:
    with pytest.raises(InvalidArgumentError, match=r"EffectLedger\('bank'\)"):
        EffectLedger("")
    with pytest.raises(InvalidArgumentError, match=r"repeats=\['mail'\]"):
        EffectLedger("bank", repeats="mail")
    with pytest.raises(InvalidArgumentError, match="'refused', 'lost' or 'applied'"):
        EffectLedger("bank", faults={0: "late"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "key", [("applied", "charge"), ("a", -1), ("a", True), ("", 0), ("a",), 1.5, -1, True, None, "", b"charge"]
)
def test_what_names_no_attempt_is_no_fault(key: Any) -> None:
    """It would never come, and a test would pass without it."""
    with pytest.raises(InvalidArgumentError, match=r"not by .*\('refund', 1\): 'lost'"):
        EffectLedger("bank", faults={key: "applied"})


def test_faults_are_checked_when_they_are_changed() -> None:
    ledger = EffectLedger(
        "bank", faults={"charge": "lost", 0: "refused", ("charge", 0): "applied", ("charge", 1): "lost"}
    )
    for change in ({"charge": "applid"}, {"charge": None}, {-1: "applied"}):
        with pytest.raises(InvalidArgumentError, match="write faults="):
            ledger.faults.update(change)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="write faults="):
            ledger.faults = change  # type: ignore[assignment]
    assert ledger.faults == {"charge": "lost", 0: "refused", ("charge", 0): "applied", ("charge", 1): "lost"}
    ledger.faults.clear()
    ledger.record("charge")
    ledger.faults = {"refund": "refused"}
    with pytest.raises(EffectRefusedError):
        ledger.record("refund")


@pytest.mark.parametrize("repeats", [5, None, ["mail", 5], "mail", b"mail"])
def test_what_may_repeat_is_said_by_name(repeats: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"write repeats=\['"):
        EffectLedger("bank", repeats=repeats)


async def test_a_fault_of_a_name_that_nothing_has_fails_the_exploration() -> None:
    """S39: a misspelt fault is one that never comes."""
    for key in ("chrage", ("chrage", 1)):
        bank.faults = {"charge": "applied", key: "applied"}
        try:
            with pytest.raises(
                InvalidArgumentError, match=r"chrage.*, which was never asked for in any run: 'charge' was"
            ):
                await explore_crashes(careful, 1999)
        finally:
            bank.faults.clear()


async def test_a_fault_of_what_happens_only_after_a_crash_is_none_that_never_comes() -> None:
    """S39"""

    async def once() -> None:
        bank.record("sent")

    @workflow
    async def sending(ctx: Context, _: None) -> None:
        try:
            await ctx.step("send", once, at_most_once=True)
        except StepInterruptedError:
            await ctx.step("ask", lambda: bank.record("asked", key="k"))

    bank.faults = {"asked": "applied"}
    try:
        assert (await explore_crashes(sending, allow_interruptions=True, compare=["state"])).interrupted
    finally:
        bank.faults.clear()


async def test_bad_arguments_of_a_ledger_say_what_to_write(autojump_clock: MockClock) -> None:
    with pytest.raises(InvalidArgumentError, match="faults="):
        EffectLedger("x", faults=["charge"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"seconds=2\.0"):
        await EffectLedger("x").perform("charge", seconds=-1)
