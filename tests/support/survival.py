"""Whether a damaged value is met as it should be: a typed error, and nobody else notices.

1. Reading a namespace gives a snapshot or a `DecodeError`; no other exception, whatever a value holds.
2. Under a supervisor every question about the workflow is answered or refused with an error of Perdure's own; what it stands
   still for is one, too; the supervisor goes on, and so does a workflow that has nothing to do with it.
3. What is sound but not what was there (another text, another number) need not be found out: no checksum is stored. It
   may lead the workflow elsewhere, so what it comes to is not judged here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import trio
from guests import BYSTANDER, Guest, hosted
from harness import MovableClock

from perdure.actors import Supervisor
from perdure.storage import DecodeError, MemoryDriver, PerdureError, ValueCodecError
from perdure.workflow import load_snapshot

__all__ = ["Damage", "host_with", "read_with"]

_PATIENCE_S = 10.0**6


@dataclass(frozen=True, slots=True)
class Damage:
    """One value of one workflow, replaced.

    Attributes:
        workflow_id: Whose; "" for the supervisor's own.
        key: Under which key.
        value: By what; `None` if it is gone.
    """

    workflow_id: str
    key: bytes
    value: bytes | None

    def __str__(self) -> str:
        value = "is gone" if self.value is None else f"is {self.value.hex()}"
        return f"the value of {self.workflow_id!r} at {self.key.hex()} {value}"


async def read_with(found: Guest, damage: Damage) -> None:
    """Read the damaged namespace; raises what must not come of that."""
    pairs = dict(found.namespaces[damage.workflow_id])
    if damage.value is None:
        del pairs[damage.key]
    else:
        pairs[damage.key] = damage.value
    try:
        await load_snapshot(MemoryDriver(pairs))
    except (DecodeError, ValueCodecError):
        pass
    except Exception as error:
        error.add_note(str(damage))
        raise


async def host_with(found: Guest, damage: Damage) -> None:
    """Host the workflow with its damage, ask everything of it, and see that the bystander goes on.

    Raises whatever is no error of Perdure's own, with what was damaged.
    """
    store = found.changed(damage.workflow_id, damage.key, damage.value)
    clock = MovableClock(found.now_ms - round(trio.current_time() * 1000))
    try:
        with trio.fail_after(_PATIENCE_S):
            async with hosted(store, clock) as supervisor:
                await _ask_everything(supervisor, damage.workflow_id)
                await trio.sleep(200)
                for workflow_id, trouble in supervisor.troubles().items():
                    assert isinstance(trouble, PerdureError), f"{workflow_id!r} stands still for {trouble!r}"
                handle = await supervisor.get(BYSTANDER)
                await handle.message("end")
                assert await handle.result() == "well"
                assert BYSTANDER not in supervisor.troubles()
    except BaseException as error:
        error.add_note(str(damage))
        raise


async def _ask_everything(supervisor: Supervisor, workflow_id: str) -> None:
    if not workflow_id:
        await _answered(supervisor.schedules)
        return
    handle: Any = await supervisor.get(workflow_id)
    for ask in (
        handle.get_state,
        handle.history,
        handle.children,
        handle.undelivered,
        handle.get_output,
        handle.get_error,
        lambda: handle.message("another", 1),
        lambda: handle.request("unread", timeout=0.001),
        lambda: handle.request("ask", id="m-ask", timeout=0.001),
        handle.wake,
        handle.recover,
        lambda: handle.message("word", "roll back"),
    ):
        await _answered(ask)
    await trio.sleep(1)
    await _answered(handle.cancel)


async def _answered(ask: Callable[[], Awaitable[object]]) -> None:
    """It is answered, or refused with a typed error."""
    with suppress(PerdureError):
        await ask()
