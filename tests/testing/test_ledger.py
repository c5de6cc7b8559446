"""The outside world as tests see it: effects are counted, keys are known, and it fails as it is told to."""

from __future__ import annotations

import pickle
from itertools import cycle

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
    EffectTimeoutError,
    SimulatedCrash,
    SimulatedDisk,
    Simulation,
    run_virtual,
    virtual_supervisor,
)
from perdure.testing.ledger import forget_effects, ledgers_of
from perdure.workflow import Context, InvalidArgumentError, current_step, workflow

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


async def test_bad_arguments_of_a_ledger_say_what_to_write(autojump_clock: MockClock) -> None:
    with pytest.raises(InvalidArgumentError, match="faults="):
        EffectLedger("x", faults=["charge"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"seconds=2\.0"):
        await EffectLedger("x").perform("charge", seconds=-1)
