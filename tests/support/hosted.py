"""The third way to run a workflow in the plays (support/restarts.py): under a supervisor, out of memory whenever it waits.

1. One process is one supervisor over a store of one workflow, whose driver is the namespace's, so that its writes are counted
   and it can die at each. The catalog outlives processes, as it would on a disk; it is not a place to die at.
2. Each time the workflow waits it is passivated, so every wait is also a return from nothing but what is stored.
3. What touches the namespace without the supervisor, as a tool would, is done while none is open; the catalog is then read
   again from the namespace, as `reindex` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import incarnations
import trio
from harness import Function, Host, Namespace, SimulatedCrashError, is_crash

from perdure.actors import Supervisor, WorkflowExistsError, open_supervisor
from perdure.actors.restarts import is_passing
from perdure.storage import Batch, CatalogRow, Driver, MemoryStore, NamespaceNotFoundError, layout
from perdure.storage.rebuild import ROW_KEYS, rebuild_row
from perdure.workflow import WorkflowHandle, WorkflowResult, WorkflowState, workflow
from perdure.workflow.activation import Activation

__all__ = ["HostedHost"]


class _Borrowed:
    """The namespace's driver, which is not the supervisor's to close."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.is_closed = False
        if hasattr(type(inner), "batch_nowait"):
            self.batch_nowait: Callable[[Batch], bool] = inner.batch_nowait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def aclose(self) -> None:
        self.is_closed = True


class _OneWorkflowStore(MemoryStore):
    """A catalog in memory, and the namespace of one workflow."""

    namespace: Namespace

    async def open_driver(self, workflow_id: str, *, create: bool = False) -> Driver:
        driver = await self.namespace.driver()
        if getattr(driver.inner, "has_failed", False):
            driver = await self.namespace.restart()
        if not create and not await driver.list(b""):
            raise NamespaceNotFoundError("it was not made", workflow_id=workflow_id)
        return _Borrowed(driver)

    async def put_rows(self, rows: Sequence[CatalogRow]) -> None:
        self._check_alive()
        await super().put_rows(rows)

    def _check_alive(self) -> None:
        driver = self.namespace._driver
        if driver is not None and driver.is_dead:
            raise SimulatedCrashError

    async def read_again(self, workflow_id: str) -> None:
        """Make the row what the namespace says, if there is one."""
        driver = await self.namespace.driver()
        pairs = {key: value for key in ROW_KEYS if (value := await driver.get(key)) is not None}
        mail = bool(await driver.list(layout.MAILBOX_PREFIX))
        if pairs and layout.WORKFLOW_TYPE_KEY not in pairs:  # another engine's: it is taken over first
            activation = await Activation.load(workflow_id, driver)
            activation.history.adopt("workflow", b"s" * 16)
            await activation.commit_from_outside()
            await self.read_again(workflow_id)
            return
        row = rebuild_row(pairs, mail_waiting=mail, created_at_ms=1, updated_at_ms=1)
        if row is not None:
            await super().put_rows([row])


_stores: WeakKeyDictionary[Namespace, _OneWorkflowStore] = WeakKeyDictionary()


def _next_store(namespace: Namespace) -> _OneWorkflowStore:
    """The store of the next process."""
    store = _OneWorkflowStore()
    store.namespace = namespace
    if namespace in _stores:
        store._disk = _stores[namespace].restart()._disk
    _stores[namespace] = store
    return store


@dataclass
class HostedHost(Host):
    """Runs one workflow as a process with a supervisor would."""

    supervisor: Supervisor | None = None
    _fn: Any = None
    _waits_for: tuple[str, ...] | None = None
    _scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    _is_down: trio.Event = field(default_factory=trio.Event)
    _is_touched: bool = True

    async def stop(self, fn: Function, input: object = None) -> WorkflowResult:
        """Run until the workflow ended or waits, and is out of memory; raises what `result()` raises."""
        supervisor = await self._up(fn)
        options: Any = {} if self.deadline is None else {"deadline": self.deadline}
        with self._dying():
            try:
                handle = await supervisor.spawn(self._fn, self.workflow_id, input, **options)
            except WorkflowExistsError:  # another engine's, begun with an input that the play does not know
                handle = await supervisor.get(self.workflow_id)
                await supervisor._residents.ensure_running(self.workflow_id)
            return await self._until_it_waits(supervisor, handle)

    @contextmanager
    def _dying(self) -> Iterator[None]:
        """Whatever a dead process says is that it died."""
        try:
            yield
        except Exception:
            driver = self.namespace._driver
            if driver is not None and driver.is_dead:
                raise SimulatedCrashError from None
            raise

    async def _up(self, fn: Function) -> Supervisor:
        if self.supervisor is None:
            assert self._nursery is not None
            self._fn = workflow(name="workflow")(fn)
            store = _next_store(self.namespace)
            await store.acquire()
            if self._is_touched:
                await store.read_again(self.workflow_id)
                self._is_touched = False
            self.supervisor = await self._nursery.start(self._host, store)
        return self.supervisor

    async def _host(self, store: _OneWorkflowStore, task_status: trio.TaskStatus[Supervisor]) -> None:
        """One life of the process."""
        self._is_down = trio.Event()
        hooks: Any = {"on_history_updated": self.on_history_updated, "on_error": self.on_error}
        try:
            await store.aclose()  # it was taken to look into it
            with trio.CancelScope() as self._scope:
                async with open_supervisor(
                    store, [self._fn], clock=self.clock, idle_timeout=None, grace=0, **hooks
                ) as supervisor:
                    task_status.started(supervisor)
                    await trio.sleep_forever()
        except BaseException as error:
            if not (self._is_restarting and is_crash(error)):
                raise  # it died by itself, and takes the host with it
        finally:
            self.supervisor = None
            self._is_down.set()

    async def _until_it_waits(self, supervisor: Supervisor, handle: WorkflowHandle) -> WorkflowResult:
        residents = supervisor._residents
        while True:
            await trio.testing.wait_all_tasks_blocked()
            trouble = supervisor.troubles().get(self.workflow_id)
            if trouble is not None and not is_passing(trouble):
                raise trouble
            actor = residents.live.get(self.workflow_id)
            if actor is None:
                state = await handle.get_state()
                if state.is_terminal:
                    return WorkflowResult(WorkflowState.COMPLETED, await handle.result())
                alarm_ms = await (await self.namespace.driver()).get_alarm(self.workflow_id)
                sleep_until = None if alarm_ms is None else alarm_ms / 1000
                return WorkflowResult(state, None, sleep_until, self._waits_for)
            activation = actor.activation
            if activation.quiet_since is None or activation.closing is not None:
                state = activation.history.state
                return WorkflowResult(WorkflowState.RUNNING if state.is_terminal else state)
            wait = activation._merged_wait()
            waiting = ("*",) if wait.names is None else (tuple(sorted(wait.names)) or None)
            self._waits_for = waiting
            residents.passivation.make_room(1)
            await trio.testing.wait_all_tasks_blocked()

    async def down(self) -> None:
        """The process leaves in order, so that somebody else may have the namespace."""
        if self.supervisor is not None:
            self._scope.cancel()
            with trio.CancelScope(shield=True):
                await self._is_down.wait()
        self._is_touched = True

    async def restart(self) -> None:
        """The process dies here, and another is opened when it is needed."""
        incarnations.record("between", (), None)
        if self.namespace._driver is not None:
            self.namespace._driver.die()
        if self.supervisor is not None:
            self._is_restarting = True
            self._scope.cancel()
            with trio.CancelScope(shield=True):
                await self._is_down.wait()
            self._is_restarting = False
        await self.namespace.restart()

    async def evict(self) -> None:
        """Evict the workflow, if it is in memory."""
        if self.supervisor is not None:
            with self._dying():
                await (await self.supervisor.get(self.workflow_id)).evict()

    async def send(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """Send a message: through the supervisor if there is one, else as a tool would."""
        if self.supervisor is not None:
            with self._dying():
                await (await self.supervisor.get(self.workflow_id)).message(name, body, id=id)
        else:
            self._is_touched = True
            await super().send(name, body, id=id)

    async def control(self, action: Literal["wake", "cancel", "recover"]) -> None:
        """Do to the workflow what its handle does; likewise."""
        if self.supervisor is not None:
            with self._dying():
                await getattr(await self.supervisor.get(self.workflow_id), action)()
        else:
            self._is_touched = True
            await super().control(action)
