"""`ctx.race`: branches beside each other, of which the first to succeed wins.

1. The winner, its value, and the deletion of all that the losers had recorded are one batch. Messages that losers had
   taken and not completed go back to their places in the mailbox in it.
2. Losers are cancelled once that batch is durable, through cancel scopes of their own; from the moment at which the winner is
   chosen they record nothing. The race returns when they have unwound, however long their work would have taken.
3. A branch that fails does not decide the race; if all fail, the race does.
4. A loser that was waiting stays `running` in the record, as the reference engine leaves it; one that was stopped in its
   work is `cancelled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from perdure.storage.schema import Branch, BranchStatus, RaceEntry
from perdure.workflow.branches import BranchFunction, Fork, Outcome, diverged_branches, recorded_value
from perdure.workflow.errors import RaceError
from perdure.workflow.failures import cut_text
from perdure.workflow.history import Node
from perdure.workflow.lanes import Lane
from perdure.workflow.mailbox import Letter
from perdure.workflow.reads import messages_below
from perdure.workflow.scope import Operation
from perdure.workflow.types import RaceResult

__all__ = ["run_race"]


async def run_race(operation: Operation, branches: Mapping[str, BranchFunction]) -> RaceResult[Any]:
    """Run the branches that have not failed until one succeeds."""
    activation = operation.scope.activation
    found = operation.find(RaceEntry)
    if found is None:
        operation.check_is_next()
        for name in branches:
            activation.history.number_of(name)
        running = {name: Branch(BranchStatus.RUNNING, None, None) for name in branches}
        node = operation.create(RaceEntry(None, running))
        activation.hold_steps()
    else:
        node, _, kind = found
        if kind.winner is not None and kind.winner in branches:
            if activation.is_collecting:
                await Fork(operation, node, branches).revisit([kind.winner])
            await activation.replayed()
            winner = kind.winner
            return RaceResult(winner, recorded_value(operation, winner, branches[winner], kind.branches[winner]))
        if kind.branches.keys() != branches.keys():
            raise diverged_branches(operation, kind.branches, branches)
    return await _Race(operation, node, branches).run()


class _Race:
    """A race that is not decided."""

    def __init__(self, operation: Operation, node: Node, branches: Mapping[str, BranchFunction]) -> None:
        self._operation = operation
        self._activation = operation.scope.activation
        self._node = node
        self._branches = branches
        self._fork = Fork(operation, node, branches)
        self._result: RaceResult[Any] | None = None
        self._lanes: dict[str, Lane] = {}
        self._scopes: dict[str, trio.CancelScope] = {}

    async def run(self) -> RaceResult[Any]:
        fork = self._fork
        names = fork.unsettled()
        if self._activation.is_collecting:
            await fork.revisit(name for name in fork.records if name not in names)
        for name, record in fork.records.items():
            if record.status is BranchStatus.COMPLETED:
                return await self._award(name, record)
        if names:
            self._operation.check_is_next()
            self._lanes = {name: Lane(self._operation.scope.lane, is_raced=True) for name in names}
            self._scopes = {name: trio.CancelScope() for name in names}
            await fork.run(names, self._settle, self._scopes, self._lanes)
        else:
            await self._activation.replayed()
        if self._result is not None:
            return self._result
        errors, causes = fork.failures()
        listed = "; ".join(f"{name}: {error}" for name, error in errors.items())
        raise RaceError(
            cut_text(f"all {len(errors)} branches of race {self._operation.name!r} failed: {listed}"),
            name=self._operation.name,
            errors=errors,
            causes=causes,
        ) from fork.cause()

    async def _award(self, name: str, record: Branch) -> RaceResult[Any]:
        """Decide a race of which a result is recorded and no winner: the reference engine leaves it so as a run ends."""
        self._operation.check_is_next()
        value = recorded_value(self._operation, name, self._branches[name], record)
        self._operation.progress()
        returned = self._record_winner(name)
        await self._activation.commit()
        self._activation.offer(returned)
        return RaceResult(name, value)

    async def _settle(self, name: str, outcome: Outcome) -> None:
        fork = self._fork
        value = fork.record(name, outcome)
        if name in fork.errors:
            await fork.settled(name)
            return
        self._result = RaceResult(name, value)
        losers = [other for other in self._lanes if other != name]
        for loser in losers:
            if fork.records[loser].status is BranchStatus.RUNNING and not self._lanes[loser].is_waiting():
                fork.mark(loser, BranchStatus.CANCELLED)
            self._lanes[loser].outrun()
        returned = self._record_winner(name)
        fork.hand_over(name)
        try:
            await self._activation.commit()
            self._activation.offer(returned)
        finally:  # should the storage fail, the activation is over, and they are to unwind as well
            for loser in losers:
                self._lanes[loser].seal()
                self._scopes[loser].cancel()

    def _record_winner(self, winner: str) -> list[Letter]:
        """Record it and forget the losers; what they had read is to be offered once that is durable."""
        history, mailbox = self._activation.history, self._activation.mailbox
        entry = self._node.entry
        assert entry is not None, "the race is recorded"
        numbers = [history.number_of(loser) for loser in self._fork.records if loser != winner]
        losers = [self._node.children[number] for number in numbers if number in self._node.children]
        held = messages_below(history, *losers)
        returned = [mailbox.put_back(message, sequence) for message, sequence in reversed(held)]
        history.change(self._node, RaceEntry(winner, self._fork.records))
        for number in numbers:
            history.forget_child(self._node, entry.location, number)
        return returned
