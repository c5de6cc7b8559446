"""What the engine asks of the supervisor for workflows that deal with each other (`perdure.workflow.host`).

1. Another workflow is held for as long as it takes to write into its namespace, never while this one waits for something else.
2. Trouble of another workflow is not the asking one's: it is raised as an error of the storage, and asked again later.
3. A child is made inside its gate, and only if its call is open still: whoever cancels the children of calls that were given
   up comes before, and there is none yet and never will be, or after, and finds it.
4. Whoever joins a workflow that exists does so alone, and looks for a cycle first (`cycles.py`).
5. That there is room in a mailbox is told to as many workflows as there is room for, first come, first served; those that
   are not in memory are brought in. Their turn is before that of senders outside of workflows, who are let in once one of
   them has come, or a moment later, whether the workflow with the room is in memory by then or not. Nothing of this is
   durable: workflows that wait have an alarm as well. One that has ended, or is in trouble, waits for no room any more.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from perdure.actors.cycles import find_chain
from perdure.actors.duties import FAULTY
from perdure.actors.errors import SupervisorClosedError, WorkflowExistsError, WorkflowNotFoundError
from perdure.actors.identity import check_same
from perdure.storage import DecodeError, PerdureError, StorageError
from perdure.storage.wake import TERMINAL_STATES
from perdure.workflow import ErrorInfo, InvalidArgumentError, Workflow, WorkflowEndedError, WorkflowState, definition_of
from perdure.workflow.birth import Birth
from perdure.workflow.calls import ChildOutcome, parent_reference
from perdure.workflow.control import recover
from perdure.workflow.errors import CallCycleError, MailboxFullError
from perdure.workflow.failures import describe
from perdure.workflow.host import CallRefusal, CallRequest, HostLeavingError, Parcel
from perdure.workflow.notices import outcome_of
from perdure.workflow.sending import accept
from perdure.workflow.typed import encode_input

if TYPE_CHECKING:
    from perdure.actors.actor import Actor
    from perdure.actors.catalog import CatalogKeeper
    from perdure.actors.residents import Residents

__all__ = ["SENDERS_BETWEEN", "Hosting"]

_REMEMBERED_MAX: Final = 100_000

_TURN_S: Final = 1.0
"""How long room is kept free for workflows that were told of it, in seconds."""

SENDERS_BETWEEN: Final = 500
"""How many new senders a workflow gets mail of before it forgets those that have ended."""

_DONE: Final = frozenset({WorkflowState.COMPLETED.value, WorkflowState.CANCELLED.value})


def _info(error: PerdureError, workflow_id: str) -> ErrorInfo:
    """What is recorded of a refusal: nothing that another run would see otherwise."""
    return ErrorInfo(type(error).__name__, describe(error).message, None, {"workflow_id": workflow_id})


@contextmanager
def _asking(workflow_id: str) -> Generator[None]:
    """Raise what goes wrong as the engine knows it."""
    try:
        yield
    except SupervisorClosedError as error:
        raise HostLeavingError(str(error)) from error
    except DecodeError as error:
        raise StorageError(f"workflow {workflow_id!r} cannot be read: {error}") from error


class Hosting:
    """The host of a supervisor's workflows."""

    def __init__(self, residents: Residents, keeper: CatalogKeeper, definitions: dict[str, Workflow[Any, Any]]) -> None:
        self._residents = residents
        self._keeper = keeper
        self._definitions = definitions
        self._joining = trio.Lock()
        self._failing: dict[str, set[str]] = {}
        self._known: set[tuple[str, str]] = set()
        self._waiting: dict[str, dict[str, None]] = {}
        self._waited_for: dict[str, set[str]] = {}
        self._new_senders: dict[str, int] = {}

    def find_workflow(self, given: object) -> Workflow[Any, Any]:
        """The registered workflow that was given."""
        if isinstance(given, str):
            name, known = given, self._definitions.get(given)
        else:
            definition = definition_of(given)
            name, known = definition.name, self._definitions.get(definition.name)
            if known is not None and known.function != definition.function:
                known = None
        if known is None:
            raise InvalidArgumentError(str(self._residents.unregistered(name)))
        return known

    # Messages.

    async def deliver(self, parcel: Parcel) -> ErrorInfo | None:
        """Put a message into another workflow's mailbox, once only, and have that run."""
        with _asking(parcel.target):
            try:
                async with self._residents.using(parcel.target) as actor:
                    try:
                        if await accept(actor.activation, parcel):
                            await self._count_sender(actor)
                    except MailboxFullError:
                        self._waiting.setdefault(parcel.target, {})[parcel.sender] = None
                        self._waited_for.setdefault(parcel.sender, set()).add(parcel.target)
                        raise
            except (WorkflowNotFoundError, WorkflowEndedError) as error:
                return _info(error, parcel.target)
            await self._residents.ensure_running(parcel.target)
        return None

    async def _count_sender(self, actor: Actor) -> None:
        """A workflow got mail of one that it does not know: now and then it forgets those that will send nothing again."""
        count = self._new_senders.get(actor.workflow_id, 0) + 1
        if count < SENDERS_BETWEEN:
            self._new_senders[actor.workflow_id] = count
            return
        self._new_senders.pop(actor.workflow_id, None)
        activation = actor.activation
        for sender in await activation.arrivals.senders(activation.driver):
            row = await self._keeper.get(sender)
            # One that failed may be recovered, and send again what it does not know that it sent.
            if row is None or row.state in _DONE:
                activation.arrivals.forget(sender)
        await activation.commit_from_outside()

    def has_room(self, workflow_id: str, count: int) -> bool:
        """Let as many senders try again; returns whether there are any."""
        senders = self._waiting.get(workflow_id)
        if not senders:
            return False
        for sender in list(senders)[:count]:
            self._leave_line(sender, workflow_id)
            actor = self._residents.live.get(sender)
            if actor is not None and actor.is_started:
                actor.activation.signal(("room", workflow_id))
            else:
                self._residents.want(sender)
        if self._residents.nursery is not None and not self._residents.is_closing:
            self._residents.nursery.start_soon(self._let_others_in, workflow_id)
        return True

    async def _let_others_in(self, workflow_id: str) -> None:
        """Those who were told may not come, and others wait for the room."""
        await trio.sleep(_TURN_S)
        actor = self._residents.live.get(workflow_id)
        if actor is not None and actor.is_usable:
            actor.activation.let_in()
        else:  # it is not made to run for that, as whoever evicted it may not want it to
            self._residents.mail.desk.senders.ask_to_look(workflow_id)

    def _leave_line(self, sender: str, workflow_id: str) -> None:
        """A workflow waits no more to send to another."""
        senders, targets = self._waiting[workflow_id], self._waited_for[sender]
        del senders[sender]
        if not senders:
            del self._waiting[workflow_id]
        targets.discard(workflow_id)
        if not targets:
            del self._waited_for[sender]

    def gone(self, actor: Actor) -> None:
        """A workflow has left memory; if it has ended, whoever waits to send to it is to know."""
        self._failing.pop(actor.workflow_id, None)
        if actor.is_ended or actor.error is not None:
            # Brought in again, it sends again. Until then it takes nobody's turn.
            for target in tuple(self._waited_for.get(actor.workflow_id, ())):
                self._leave_line(actor.workflow_id, target)
        if actor.is_ended:
            self._new_senders.pop(actor.workflow_id, None)
            self.has_room(actor.workflow_id, len(self._waiting.get(actor.workflow_id, ())))

    # Calls.

    async def start_child(self, request: CallRequest) -> ChildOutcome | CallRefusal | None:
        """See that the child exists and will tell its end."""
        caller, call = request.caller.history, request.call
        encoded = encode_input(request.workflow.function, request.input, bytes_max=request.caller.user_bytes_max)
        reference = parent_reference(caller.workflow_id, caller.seed)
        is_ours = is_over = False

        def check(actor: Actor) -> None:
            nonlocal is_ours, is_over
            check_same(actor, request.workflow, encoded)
            is_ours = actor.activation.history.calls.parent == reference
            is_over = actor.activation.history.state.is_terminal

        def may_create() -> bool:
            return not caller.state.is_terminal and caller.calls.get(call.entry_id) is call

        with _asking(call.child_id):
            try:
                if call.child_id == caller.workflow_id:
                    check(self._residents.live[call.child_id])
                    return self._cycle((caller.workflow_id, caller.workflow_id))
                is_there = await self._residents.create_or_find(
                    request.workflow, call.child_id, request.input, check, Birth(parent=reference), may_create
                )
                if not is_there or (is_ours and not is_over):
                    return None
                return await self._join(request, reference, is_ours=is_ours)
            except (WorkflowExistsError, WorkflowNotFoundError) as error:
                return CallRefusal(_info(error, call.child_id))
            finally:
                self._note_known(caller.workflow_id, call.child_id)

    async def _join(
        self, request: CallRequest, reference: bytes, *, is_ours: bool
    ) -> ChildOutcome | CallRefusal | None:
        caller_id, call = request.caller.history.workflow_id, request.call
        if is_ours:
            return await self._register(request, reference)
        async with self._joining:
            if not call.is_raced:
                chain = await find_chain(self._residents, caller_id, call.child_id, self._failing)
                if chain is not None:
                    self._note_failing(request)
                    return self._cycle(chain)
            return await self._register(request, reference)

    def _note_failing(self, request: CallRequest) -> None:
        """A call waits for nobody any more, though that is not recorded yet; those that were are forgotten."""
        caller = request.caller.history
        failing = self._failing.get(caller.workflow_id, ())
        open_still = {entry_id for entry_id in failing if caller.calls.get(entry_id) is not None}
        self._failing[caller.workflow_id] = open_still | {request.call.entry_id}

    async def _register(self, request: CallRequest, reference: bytes) -> ChildOutcome | None:
        """See that the child will tell, or how it has ended."""
        while True:
            async with self._residents.using(request.call.child_id) as actor:
                activation = actor.activation
                history = activation.history
                is_ours = history.calls.parent == reference
                if is_ours and request.call.is_again and history.state is WorkflowState.FAILED:
                    await recover(activation)
                if not is_ours and not history.state.is_terminal:
                    history.calls.join(request.caller.history.workflow_id)
                    await activation.commit_from_outside()
                if activation.closing in FAULTY:
                    continue
                outcome = outcome_of(history)
                if outcome is not None:
                    await activation.settled()
                return outcome

    async def look_after(self, caller_id: str, child_id: str) -> ChildOutcome | CallRefusal | None:
        """See that nothing has become of a child that was started before; once in the life of the supervisor."""
        if (caller_id, child_id) in self._known:
            return None
        with _asking(child_id):
            row = await self._keeper.get(child_id)
            try:
                if row is None:
                    raise self._residents.not_found(child_id)
                if row.state in TERMINAL_STATES and row.problem is None:
                    async with self._residents.using(child_id) as actor:
                        await actor.activation.settled()
                        return outcome_of(actor.activation.history)
            except WorkflowNotFoundError as error:
                return CallRefusal(_info(error, child_id))
        self._note_known(caller_id, child_id)
        return None

    def _note_known(self, caller_id: str, child_id: str) -> None:
        if len(self._known) >= _REMEMBERED_MAX:
            self._known.clear()
        self._known.add((caller_id, child_id))

    def _cycle(self, chain: tuple[str, ...]) -> CallRefusal:
        shown = " -> ".join(map(repr, chain))
        text = f"none of these could ever go on, as each waits for the next: {shown}; call a workflow of another id"
        return CallRefusal(ErrorInfo(CallCycleError.__name__, text, None, {"workflow_id": chain[0]}), chain)
