"""What workflows owe to each other: callers are told how their children ended, and children that nobody waits for are cancelled.

1. A duty is durable before anybody acts on it (`perdure.workflow.calls`), and removed in one batch once it is done. In between
   the catalog has the workflow due at once, so a crash leaves it to the next start.
2. Doing one twice is harmless: a caller takes a child's end once, and a cancelled workflow stays cancelled.
3. A workflow that has just ended does its duties before it leaves memory; every other one is opened for a visit to read what
   it owes, and for another to strike it off. No two visits are ever held at once, so that none waits for another's place.
   Nor does one that has just ended wait for another one to leave memory, which may have to tell or to cancel this one: what
   it cannot do so is left to a visit.
4. What fails (the storage of the other workflow) is tried again after a pause that doubles up to `PAUSE_MAX_S`; the rest goes on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from perdure.actors.errors import SupervisorClosedError, WorkflowNotFoundError
from perdure.workflow.activation import Activation, Closing
from perdure.workflow.calls import ChildOutcome, OpenCall, parent_reference
from perdure.workflow.notices import outcome_of, receive

if TYPE_CHECKING:
    from perdure.actors.actor import Actor
    from perdure.actors.residents import Residents

__all__ = ["FAULTY", "PAUSE_MAX_S", "PAUSE_S", "Duties"]

FAULTY: Final = (Closing.FAULT, Closing.USER_CANCELLED, Closing.STORAGE)
"""Why an activation is over of which not all that others wrote is kept."""

PAUSE_S: Final = 1.0
"""The first pause before a duty that failed is tried again, in seconds."""

PAUSE_MAX_S: Final = 60.0
"""The longest such pause, in seconds."""

_WORKFLOWS_AT_ONCE: Final = 4
_OTHERS_AT_ONCE: Final = 4

_log = logging.getLogger("perdure.actors")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one workflow owes, read at one moment."""

    workflow_id: str
    reference: bytes
    outcome: ChildOutcome | None
    tell: tuple[str, ...]
    cancel: tuple[OpenCall, ...]


@dataclass(slots=True)
class _Report:
    """What became of a plan."""

    cancelled: list[OpenCall]
    is_told: bool = True


def _plan(activation: Activation) -> _Plan | None:
    history = activation.history
    calls = history.calls
    if not calls.duties:
        return None
    outcome = outcome_of(history) if "tell" in calls.duties else None
    return _Plan(
        history.workflow_id,
        parent_reference(history.workflow_id, history.seed),
        outcome,
        () if outcome is None else tuple(calls.callers()),
        tuple(calls.abandoned.values()),
    )


class Duties:
    """Does what the workflows of one supervisor owe to each other."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._wanted: dict[str, None] = {}
        self._has_some = trio.Event()
        self._busy: set[str] = set()
        self._again: set[str] = set()
        self._pauses: dict[str, float] = {}

    def want(self, workflow_id: str) -> None:
        """A workflow has duties."""
        if workflow_id in self._busy:
            self._again.add(workflow_id)
        else:
            self._wanted[workflow_id] = None
            self._has_some.set()

    def remind(self, workflow_id: str) -> None:
        """A workflow was begun or has left memory that has duties, unless they are being done or wait for another try."""
        if workflow_id not in self._busy and workflow_id not in self._pauses:
            self.want(workflow_id)

    @trio.lowlevel.enable_ki_protection
    async def run(self, nursery: trio.Nursery) -> None:
        """Do duties, for ever, in the nursery."""
        limiter = trio.CapacityLimiter(_WORKFLOWS_AT_ONCE)
        while True:
            if not self._wanted:
                self._has_some = trio.Event()
                await self._has_some.wait()
            token = object()
            await limiter.acquire_on_behalf_of(token)
            workflow_id = next(iter(self._wanted), None)
            if workflow_id is None:  # what was wanted is seen to already
                limiter.release_on_behalf_of(token)
                continue
            del self._wanted[workflow_id]
            self._busy.add(workflow_id)
            nursery.start_soon(self._visit, workflow_id, limiter, token, nursery)

    async def _visit(
        self, workflow_id: str, limiter: trio.CapacityLimiter, token: object, nursery: trio.Nursery
    ) -> None:
        """Do the duties of one workflow, whether it is in memory or not."""
        is_done = False
        try:
            is_done = await self._do(workflow_id)
        except (SupervisorClosedError, WorkflowNotFoundError):
            is_done = True  # the next start does it; or it is gone, and owes nothing
        except Exception as error:
            _log.warning(
                "workflow %r cannot be asked for what it owes: %s",
                workflow_id,
                error,
                extra={"workflow_id": workflow_id},
            )
        finally:
            limiter.release_on_behalf_of(token)
            self._finish(workflow_id)
        if is_done:
            self._pauses.pop(workflow_id, None)
        elif not self._residents.is_closing:
            pause_s = self._pauses.get(workflow_id, PAUSE_S)
            # At once: the workflow may be begun, and leave again, before another task has run.
            self._pauses[workflow_id] = min(2 * pause_s, PAUSE_MAX_S)
            nursery.start_soon(self._later, workflow_id, pause_s)

    async def _do(self, workflow_id: str) -> bool:
        async with self._residents.using(workflow_id) as actor:
            await actor.activation.settled()
            plan = _plan(actor.activation)
            has_ended = actor.activation.history.state.is_terminal
        if plan is None:
            return True
        report = await self._carry_out(plan)
        async with self._residents.using(workflow_id) as actor:
            is_done = await _strike_off(actor.activation, plan, report)
        if not (is_done or has_ended):
            self._residents.want(workflow_id)  # the catalog has it due at once, and so says nothing of its alarm
        return is_done

    def _finish(self, workflow_id: str) -> None:
        self._busy.discard(workflow_id)
        if workflow_id in self._again:
            self._again.discard(workflow_id)
            self.want(workflow_id)

    async def _later(self, workflow_id: str, pause_s: float) -> None:
        await trio.sleep(pause_s)
        self.want(workflow_id)

    async def see_to(self, actor: Actor) -> None:
        """Do the duties of a workflow that has ended and is still in memory; what fails is tried again later."""
        workflow_id = actor.workflow_id
        if not actor.driver.has_duties or not actor.is_ended:
            return
        if workflow_id in self._busy:  # with what it owed before it ended
            self._again.add(workflow_id)
            return
        self._wanted.pop(workflow_id, None)  # what it was wanted for is done here
        self._busy.add(workflow_id)
        is_done = False
        actor.hold()  # so that whoever makes a workflow of this id anew does not close it meanwhile
        try:
            plan = _plan(actor.activation)
            is_done = plan is None or await _strike_off(
                actor.activation, plan, await self._carry_out(plan, is_waiting=False)
            )
        except Exception as error:
            _log.warning(
                "workflow %r cannot do what it owes: %s", workflow_id, error, extra={"workflow_id": workflow_id}
            )
        finally:
            actor.release()
            if not is_done:
                self._again.add(workflow_id)
            self._finish(workflow_id)

    async def _carry_out(self, plan: _Plan, *, is_waiting: bool = True) -> _Report:
        """Do what is planned; unless `is_waiting`, without waiting for a workflow that is leaving memory."""
        report = _Report([])
        limiter = trio.CapacityLimiter(_OTHERS_AT_ONCE)

        async def tell(caller_id: str) -> None:
            async with limiter:
                has_ended = None if is_waiting else self._has_ended(caller_id)
                if not (await self._tell(plan, caller_id) if has_ended is None else has_ended):
                    report.is_told = False

        async def cancel(call: OpenCall) -> None:
            async with limiter:
                has_ended = None if is_waiting else self._has_ended(call.child_id)
                if await self._cancel(plan, call) if has_ended is None else has_ended:
                    report.cancelled.append(call)

        if len(plan.tell) == 1 and not plan.cancel:  # the usual case
            await tell(plan.tell[0])
            return report
        async with trio.open_nursery() as nursery:
            for caller_id in plan.tell:
                nursery.start_soon(tell, caller_id)
            for call in plan.cancel:
                nursery.start_soon(cancel, call)
        return report

    def _has_ended(self, workflow_id: str) -> bool | None:
        """Whether one that is leaving memory has ended, durably, so that it need not be told or cancelled.

        Returns:
            `None` for one that is not leaving.
        """
        actor = self._residents.live.get(workflow_id)
        return None if actor is None or actor.is_usable else actor.driver.is_terminal

    async def _tell(self, plan: _Plan, caller_id: str) -> bool:
        """Tell one caller; returns whether it knows, durably, or is no more."""
        assert plan.outcome is not None, "it has ended"
        try:
            while True:
                async with self._residents.using(caller_id) as actor:
                    await receive(actor.activation, plan.workflow_id, plan.outcome)
                    if actor.activation.closing not in FAULTY:
                        return True
        except WorkflowNotFoundError:
            return True
        except SupervisorClosedError:
            return False
        except Exception as error:
            _log.warning(
                "workflow %r cannot tell %r how it ended: %s",
                plan.workflow_id,
                caller_id,
                error,
                extra={"workflow_id": plan.workflow_id},
            )
            return False

    async def _cancel(self, plan: _Plan, call: OpenCall) -> bool:
        """Cancel one child; returns whether it is, durably, or is not to be."""
        try:
            async with self._residents.using(call.child_id) as actor:
                is_ours = actor.activation.history.calls.parent == plan.reference
                if is_ours and self._is_abandoned(plan, call):
                    await actor.cancel()
                return True
        except WorkflowNotFoundError:
            return True
        except SupervisorClosedError:
            return False
        except Exception as error:
            _log.warning(
                "workflow %r cannot cancel %r: %s",
                plan.workflow_id,
                call.child_id,
                error,
                extra={"workflow_id": plan.workflow_id},
            )
            return False

    def _is_abandoned(self, plan: _Plan, call: OpenCall) -> bool:
        """Whether nobody waits for the child now: recovered meanwhile, its caller may have called it again."""
        actor = self._residents.live.get(plan.workflow_id)
        if actor is None:
            return True
        calls = actor.activation.history.calls
        return call.entry_id in calls.abandoned and not calls.of_child(call.child_id)


async def _strike_off(activation: Activation, plan: _Plan, report: _Report) -> bool:
    """Remove the duties that were done, durably; returns whether none is left."""
    calls = activation.history.calls
    # It may have been recovered meanwhile, and have ended otherwise: that is another thing to tell.
    if plan.outcome is not None and report.is_told and outcome_of(activation.history) == plan.outcome:
        calls.told()
    if plan.outcome is None and not activation.history.state.is_terminal:
        calls.went_on()  # there is nothing to tell: another engine ran it again, which does not know of our keys
    calls.cancelled(report.cancelled)
    await activation.commit_from_outside()
    return not calls.duties and activation.closing not in FAULTY
