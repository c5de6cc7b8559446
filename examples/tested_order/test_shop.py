"""The shop charges once, and ships or gives the money back, wherever its process dies."""

from __future__ import annotations

import pytest
from shop import order, services

from perdure.testing import EffectLedger, FinishedRun, Mail, explore_crashes

ORDER = {"sku": 7, "cents": 1999}


class LedgerBank:
    """A bank as the shop knows it, on a ledger."""

    def __init__(self, ledger: EffectLedger) -> None:
        self.ledger = ledger

    async def charge(self, cents: int, key: str) -> str:
        return str(await self.ledger.perform("charge", cents, key=key, returns="pay-1", seconds=0.5))

    async def refund(self, payment: str, key: str) -> None:
        await self.ledger.perform("refund", payment, key=key, seconds=0.5)


class LedgerCarrier:
    """A carrier likewise."""

    def __init__(self, ledger: EffectLedger) -> None:
        self.ledger = ledger

    def order_pickup(self, parcel: str, key: str) -> str:
        return str(self.ledger.record("pickup", parcel, key=key, returns="TRACK-1"))


@pytest.fixture(autouse=True)
def bank(monkeypatch: pytest.MonkeyPatch) -> EffectLedger:
    """What the bank does; for the test the shop has this bank, and a carrier."""
    ledger = EffectLedger("bank")
    monkeypatch.setattr(services, "bank", LedgerBank(ledger), raising=False)
    monkeypatch.setattr(services, "carrier", LedgerCarrier(EffectLedger("carrier")), raising=False)
    return ledger


async def test_an_order_is_charged_once_and_shipped() -> None:
    explored = await explore_crashes(order, ORDER, messages=[Mail("packed", "box-1", at=3600)])
    assert explored.first.output == "TRACK-1"


async def test_an_order_that_nobody_packs_is_given_back() -> None:
    def money_is_where_it_belongs(run: FinishedRun) -> None:
        assert [effect.name for effect in run.effects["bank"]] == ["charge", "refund"]

    explored = await explore_crashes(order, ORDER, check=money_is_where_it_belongs)
    assert explored.first.output == "given back"


async def test_a_bank_that_does_not_answer_in_time(bank: EffectLedger) -> None:
    bank.faults["charge"] = "applied"
    explored = await explore_crashes(order, ORDER, messages=[("packed", "box-1")])
    assert explored.first.output == "TRACK-1"
