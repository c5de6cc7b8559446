"""`ctx.join`: branches beside each other, all of which are waited for.

1. A branch that fails does not stop the others; once all are settled, the join returns every value or raises every error.
2. A settled branch is kept: its function is not run again, whatever becomes of the others.
3. A join of which every branch is settled is visited as a unit on replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.storage.schema import Branch, BranchStatus, JoinEntry
from perdure.workflow.branches import BranchFunction, Fork, JoinResult, Outcome, diverged_branches, recorded_value
from perdure.workflow.errors import JoinError
from perdure.workflow.failures import cut_text
from perdure.workflow.scope import Operation

__all__ = ["run_join"]


async def run_join(operation: Operation, branches: Mapping[str, BranchFunction]) -> JoinResult[Any]:
    """Run the branches that are not settled, and return all values by branch name, in the order given."""
    activation = operation.scope.activation
    found = operation.find(JoinEntry)
    if found is None:
        operation.check_is_next()
        for name in branches:
            activation.history.number_of(name)
        node = operation.create(JoinEntry({name: Branch(BranchStatus.RUNNING, None, None) for name in branches}))
        activation.hold_steps()
    else:
        node = found[0]
        if found[2].branches.keys() != branches.keys():
            raise diverged_branches(operation, found[2].branches, branches)
    fork = Fork(operation, node, branches)
    values: dict[str, Any] = {}
    names = fork.unsettled()
    if activation.is_collecting:
        await fork.revisit(name for name in branches if name not in names)
    if names:
        operation.check_is_next()

        async def settle(name: str, outcome: Outcome) -> None:
            value = fork.record(name, outcome)
            if name not in fork.errors:
                values[name] = value
            await fork.settled(name)

        await fork.run(names, settle)
    else:
        await activation.replayed()
    result: JoinResult[Any] = JoinResult(
        {
            name: values[name] if name in values else recorded_value(operation, name, function, fork.records[name])
            for name, function in branches.items()
            if fork.records[name].status is not BranchStatus.FAILED
        }
    )
    if len(result) < len(branches):
        raise _failure(operation, fork, result) from fork.cause()
    return result


def _failure(operation: Operation, fork: Fork, values: JoinResult[Any]) -> JoinError:
    errors, causes = fork.failures()
    listed = "; ".join(f"{name}: {error}" for name, error in errors.items())
    return JoinError(
        cut_text(f"{len(errors)} of {len(fork.records)} branches of join {operation.name!r} failed: {listed}"),
        name=operation.name,
        errors=errors,
        values=values,
        causes=causes,
    )
