"""Known bugs of durable engines, planted in ours: steps, branches, rollback, calls (`perdure.workflow`)."""

from __future__ import annotations

from typing import Final

from mutant import Change, Mutant

__all__ = ["PRIMITIVE_MUTANTS"]


def _in(module: str, before: str, after: str) -> Change:
    return Change(f"perdure.workflow.{module}", before, after)


PRIMITIVE_MUTANTS: Final = (
    # Steps.
    Mutant(
        "attempts-not-stored",
        "how often a step was tried is known to the process only",
        "S17 S18",
        (
            _in(
                "step",
                "        history.put_metadata(self._node, metadata)\n",
                "        metadata.attempts = 0\n        history.put_metadata(self._node, metadata)\n"
                "        metadata.attempts = self._number\n",
            ),
        ),
    ),
    Mutant(
        "failed-step-runs-again",
        "a step that failed for good is run again on replay, instead of failing as it did",
        "S3 S17",
        (
            _in(
                "step",
                "    if metadata.status is EntryStatus.EXHAUSTED:\n"
                "        return _replay_failure("
                "activation, _recorded_failure(activation, operation.name, entry, kind, metadata))\n",
                "",
            ),
        ),
    ),
    Mutant(
        "none-is-no-result",
        "a step that returned None is run again on replay",
        "S7",
        (
            _in(
                "step",
                "    if metadata.status is EntryStatus.COMPLETED:\n        if options.rollback is not None:\n",
                "    if metadata.status is EntryStatus.COMPLETED and kind.error is not None:\n"
                "        if options.rollback is not None:\n",
            ),
        ),
    ),
    Mutant(
        "at-most-once-begun-unrecorded",
        "an `at_most_once` step is not recorded before its function begins",
        "S22",
        (
            _in(
                "step",
                "            self._metadata.status = EntryStatus.RUNNING\n"
                "            self._record(StepEntry(None, None))\n",
                "            self._metadata.status = EntryStatus.RUNNING\n",
            ),
        ),
    ),
    Mutant(
        "key-of-the-attempt",
        "the idempotency key of a step is another one for each attempt",
        "S43",
        (
            _in(
                "step",
                "        return derive_step_key(self._seed, self.path, self._undone)\n",
                "        return derive_step_key(self._seed, self.path, self._undone + self.attempt - 1)\n",
            ),
        ),
    ),
    Mutant(
        "crash-loop-not-counted",
        "activations that end the process before they record anything are not counted",
        "S18",
        (
            _in(
                "activation",
                "            self.history.set_idle_activations(self.history.idle_activations + 1)\n"
                "        if self.history.state is not WorkflowState.RUNNING:\n",
                "            pass\n        if self.history.state is not WorkflowState.RUNNING:\n",
            ),
        ),
    ),
    # Branches.
    Mutant(
        "children-before-their-parent",
        "the steps of a join's branches begin before it is durable which branches there are",
        "S30 S39",
        (_in("join", "        activation.hold_steps()\n", ""),),
    ),
    Mutant(
        "winner-not-durable-first",
        "a race's losers are cancelled before the winner is durable",
        "S29 S39",
        (
            _in(
                "race",
                "        fork.hand_over(name)\n        try:\n",
                "        fork.hand_over(name)\n        for loser in losers:\n            self._lanes[loser].seal()\n"
                "            self._scopes[loser].cancel()\n        await trio.lowlevel.cancel_shielded_checkpoint()\n"
                "        try:\n",
            ),
        ),
    ),
    Mutant(
        "winner-told-before-commit",
        "a race returns before its winner is durable",
        "S29 S39",
        (
            _in(
                "race",
                "        try:\n            await self._activation.commit()\n"
                "            self._activation.offer(returned)\n",
                "        try:\n            await trio.lowlevel.cancel_shielded_checkpoint()\n"
                "            self._activation.offer(returned)\n",
            ),
        ),
    ),
    Mutant(
        "loser-history-kept",
        "what the losers of a race had recorded stays in history",
        "S29",
        (_in("race", "            history.forget_child(self._node, entry.location, number)\n", "            pass\n"),),
    ),
    # Rollback.
    Mutant(
        "rollback-in-order",
        "rollback handlers run in the order of completion instead of its reverse",
        "S35",
        (
            _in(
                "collecting",
                "    keyed.sort(key=lambda pair: pair[0], reverse=True)\n",
                "    keyed.sort(key=lambda pair: pair[0])\n",
            ),
        ),
    ),
    Mutant(
        "completion-order-not-stored",
        "the count by which steps are ordered for the rollback begins anew with each process",
        "S35",
        (
            _in(
                "history",
                "        self.pending.put(layout.COMPLETION_SEQUENCE_KEY, layout.encode_u64(self.completions))\n",
                "",
            ),
        ),
    ),
    Mutant(
        "undone-before-commit",
        "the next rollback handler begins before it is durable that the one before has run",
        "S35 S39",
        (
            _in(
                "rollback",
                "        if kept != detail:\n            self._put_detail(kept)\n"
                "        await self._activation.commit()\n",
                "        if kept != detail:\n            self._put_detail(kept)\n",
            ),
        ),
    ),
    # Families.
    Mutant(
        "child-before-its-parent",
        "a child is made before the call of it is durable",
        "S39",
        (
            _in(
                "children",
                "            raise await self.fail(_without_stack(error)) from error\n"
                "        await activation.commit()\n",
                "            raise await self.fail(_without_stack(error)) from error\n",
            ),
        ),
    ),
    Mutant(
        "generation-not-in-ids",
        "after a replay from a step, a call has its child's earlier id, and so its earlier result",
        "S14 S52",
        (_in("derived", "_CALL, generation, fresh))", "_CALL, 0, fresh))"),),
    ),
    # Trouble with the storage, and what is derived.
    Mutant(
        "refused-batch-forgotten",
        "what was in a batch that the storage refused is not written with the next",
        "S15 S41",
        (
            _in(
                "committer",
                "        except BatchRefusedError:\n            self._pending.put_back(batch)\n            raise\n",
                "        except BatchRefusedError:\n            raise\n",
            ),
        ),
    ),
    Mutant(
        "unknown-outcome-goes-on",
        "after a commit of unknown outcome the activation goes on as if nothing had been written",
        "S15 S21",
        (
            _in(
                "committer",
                "            self.broken = error\n            raise\n        self.commits += 1\n",
                "            raise\n        self.commits += 1\n",
            ),
        ),
    ),
    Mutant(
        "eviction-interrupts-a-commit",
        "an eviction interrupts the commit of work that was done",
        "S20 S33",
        (
            _in(
                "committer",
                "                with trio.CancelScope(shield=True):\n"
                "                    await self._commit_batch(self._driver, batch)\n",
                "                await self._commit_batch(self._driver, batch)\n",
            ),
        ),
    ),
    Mutant(
        "seed-not-stored",
        "what ids and random numbers are derived from is another one after a restart",
        "S39",
        (_in("history", "            self.pending.put(layout.SEED_KEY, seed)\n", ""),),
    ),
    Mutant(
        "version-decided-again",
        "`get_version` says the latest on replay too, whatever the run had begun with",
        "S2",
        (_in("versions", "        return found[2].resolved\n", "        return latest\n"),),
    ),
)
"""In the order of the list that is printed."""
