"""Known bugs of hosts of workflows, planted in ours (`perdure.actors`)."""

from __future__ import annotations

from typing import Final

from mutant import Change, Mutant

__all__ = ["HOST_MUTANTS"]


def _in(module: str, before: str, after: str) -> Change:
    return Change(f"perdure.actors.{module}", before, after)


HOST_MUTANTS: Final = (
    Mutant(
        "spawn-before-commit",
        "`spawn` returns before it is durable that the workflow exists",
        "S39 S43",
        (
            _in(
                "residents",
                "                activation.begin_at_once()\n            await activation.commit_from_outside()\n",
                "                activation.begin_at_once()\n",
            ),
        ),
    ),
    Mutant(
        "catalog-later-than-file",
        "the catalog learns some time after the commit that a workflow is to be woken earlier",
        "S24 S46 S50",
        (
            _in(
                "catalog",
                "        await self.move_earlier(standing.wake_ms(wants_mail=self._wants_mail(standing)))\n"
                "        self._is_in_doubt = True\n",
                "        self._is_in_doubt = True\n",
            ),
        ),
    ),
    Mutant(
        "catalog-in-memory-order",
        "a row that waits to be written can be written over a newer one",
        "S50",
        (
            _in(
                "catalog",
                "            self._later.pop(row.workflow_id, None)\n            await self._store.put_rows([row])\n",
                "            await self._store.put_rows([row])\n",
            ),
        ),
    ),
    Mutant(
        "leaving-actor-takes-mail",
        "an actor that is about to leave memory is given messages",
        "S45",
        (
            _in(
                "actor",
                "        if closing is None or closing is Closing.EXPIRED:",
                "        if closing is None or closing is Closing.EXPIRED or closing is Closing.EVICTED:",
            ),
        ),
    ),
    Mutant(
        "woken-actor-passivated",
        "a workflow that was woken and has not run yet is taken out of memory as one that waits",
        "S45",
        (
            _in(
                "passivation",
                "        if not actor.activation.is_at_rest or not actor.is_usable:\n",
                "        if actor.activation.quiet_since is None or not actor.is_usable:\n",
            ),
        ),
    ),
    Mutant(
        "dormant-alarm-not-expected",
        "the alarm of a workflow that leaves memory does not shorten the wait for the next one",
        "S24 S46",
        (
            _in(
                "alarms",
                "        self._floor_ms = min(self._floor_ms, max(1, alarm_ms))\n        self._waiting.cancel()\n",
                "        self._floor_ms = min(self._floor_ms, max(1, alarm_ms))\n",
            ),
        ),
    ),
    Mutant(
        "due-rows-passed-over",
        "who goes to sleep, due already, while the catalog is looked through is passed over for good",
        "S45 S46",
        (
            _in(
                "alarms",
                "        self._floor_ms = min(self._floor_ms, max(1, alarm_ms))\n",
                "        self._floor_ms = max(self._floor_ms, max(1, alarm_ms))\n",
            ),
        ),
    ),
    Mutant(
        "deletes-what-came-back",
        "a deletion does not look again whether the workflow has still ended, once it is alone with it",
        "S43 S52",
        (
            _in(
                "removal",
                "            if row is None or not condition(row) or residents.must_stay(workflow_id):\n",
                "            if row is None or residents.must_stay(workflow_id):\n",
            ),
        ),
    ),
    Mutant(
        "retention-deletes-a-running-workflow",
        "what is to be deleted after its time may have come back to life",
        "S43",
        (
            _in(
                "retention",
                "            return is_removable(row) and row.state == found.state and row.updated_at_ms < before_ms\n",
                "            return True\n",
            ),
        ),
    ),
    Mutant(
        "told-before-durable",
        "a caller is told how its child has ended before that is durable",
        "S39",
        (_in("duties", "            await actor.activation.settled()\n", ""),),
    ),
    Mutant(
        "duty-struck-off-undone",
        "that a caller could not be told is forgotten",
        "S39 S41",
        (_in("duties", "                    report.is_told = False\n", "                    pass\n"),),
    ),
    Mutant(
        "cancels-another-parents-child",
        "a workflow cancels children that another one, or an earlier one of its id, has made",
        "S52",
        (
            _in(
                "duties",
                "                is_ours = actor.activation.history.calls.parent == plan.reference\n",
                "                is_ours = True\n",
            ),
        ),
    ),
    Mutant(
        "run-noted-before-it-is-made",
        "that a schedule's run was started is durable before the run is",
        "S39",
        (
            _in(
                "schedules",
                "                        await self._start(standing, occurrence_ms)\n"
                "                    await self._note_started(name, occurrence_ms)\n",
                "                        await self._note_started(name, occurrence_ms)\n"
                "                        await self._start(standing, occurrence_ms)\n",
            ),
        ),
    ),
)
"""In the order of the list that is printed."""
