"""What schedules need of the supervisor: starting their runs, and knowing which have ended."""

from __future__ import annotations

from typing import Any

from perdure.actors.actor import Actor
from perdure.actors.catalog import CatalogKeeper
from perdure.actors.errors import SupervisorClosedError, WorkflowNotFoundError
from perdure.actors.identity import check_same
from perdure.actors.residents import Residents
from perdure.storage import VALUE_BYTES_MAX, PerdureError
from perdure.storage.wake import TERMINAL_STATES
from perdure.workflow import Workflow
from perdure.workflow.activation import USER_OVERHEAD_BYTES
from perdure.workflow.birth import Birth
from perdure.workflow.typed import decode_input, encode_input

__all__ = ["ScheduleRuns"]


class ScheduleRuns:
    """The `ScheduleHost` of a supervisor."""

    def __init__(self, residents: Residents, keeper: CatalogKeeper, definitions: dict[str, Workflow[Any, Any]]) -> None:
        self._residents = residents
        self._keeper = keeper
        self._definitions = definitions

    def check_open(self) -> None:
        """See `ScheduleHost`."""
        self._residents.check_open()

    def refuse_unregistered(self, workflow: str) -> None:
        """See `ScheduleHost`."""
        if workflow not in self._definitions:
            raise self._residents.unregistered(workflow)

    async def start_run(self, workflow: str, workflow_id: str, input_data: bytes, birth: Birth) -> None:
        """See `ScheduleHost`."""
        self.refuse_unregistered(workflow)
        definition = self._definitions[workflow]
        input_value = decode_input(definition.function, input_data)
        encoded = encode_input(definition.function, input_value, bytes_max=VALUE_BYTES_MAX - USER_OVERHEAD_BYTES)

        def check(actor: Actor) -> None:
            check_same(actor, definition, encoded)

        await self._residents.create_or_find(definition, workflow_id, input_value, check, birth)

    async def has_ended(self, workflow_id: str) -> bool:
        """See `ScheduleHost`. One that was at work when a process died may have ended before the catalog knew."""
        row = await self._keeper.get(workflow_id)
        if row is None or row.state in TERMINAL_STATES:
            return True
        if row.next_wake_ms != 0 or row.problem is not None:
            return False
        try:
            async with self._residents.using(workflow_id) as actor:
                return actor.driver.is_terminal
        except WorkflowNotFoundError:
            return True
        except SupervisorClosedError:
            raise
        except PerdureError:  # it cannot be looked at, and so has not ended
            return False
