"""The part of a supervisor that starts workflows by the clock; each method is thin, and what it does is in `schedules.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload
from zoneinfo import ZoneInfo

from perdure.actors.callers import rests_with_host
from perdure.actors.schedule_handle import ScheduleHandle, ScheduleInfo, ScheduleOptions, define, describe
from perdure.actors.schedule_record import Misfire, Overlap
from perdure.actors.schedules import Schedules
from perdure.workflow import Clock, Context, Workflow
from perdure.workflow.checks import check_schedule_name
from perdure.workflow.typed import encode_input

if TYPE_CHECKING:
    from perdure.actors.options import WorkflowLike
    from perdure.actors.residents import Residents

__all__ = ["Scheduling"]

InputT = TypeVar("InputT")


class Scheduling:
    """What `Supervisor` offers to start workflows by the clock.

    Args:
        schedules: All of them.
        clock: The time.
        find: Gives the registered workflow for what users hand over.
        input_bytes_max: The most bytes that an input may take.
    """

    _residents: Residents

    def __init__(
        self,
        schedules: Schedules,
        clock: Clock,
        find: Callable[[WorkflowLike | str], Workflow[Any, Any]],
        input_bytes_max: int,
    ) -> None:
        self._schedules = schedules
        self._clock = clock
        self._find = find
        self._input_bytes_max = input_bytes_max

    @overload
    async def schedule(
        self,
        name: str,
        workflow: Callable[[Context, InputT], Awaitable[object]],
        input: InputT,
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleHandle: ...

    @overload
    async def schedule(
        self, name: str, workflow: Callable[[Context, None], Awaitable[object]], **options: Unpack[ScheduleOptions]
    ) -> ScheduleHandle: ...

    @overload
    async def schedule(
        self, name: str, workflow: str, input: object = None, **options: Unpack[ScheduleOptions]
    ) -> ScheduleHandle: ...

    @rests_with_host
    async def schedule(
        self,
        name: str,
        workflow: WorkflowLike | str,
        input: object = None,
        *,
        cron: str | None = None,
        every: float | None = None,
        timezone: str | ZoneInfo = "UTC",
        overlap: Overlap = "skip",
        misfire: Misfire = "once",
        workflow_id: str | None = None,
    ) -> ScheduleHandle:
        """Start a workflow again and again, exactly once for each occurrence; a program may say so at every start.

        Durable on return. A schedule that exists under the name stays as it is when this asks for the same. Otherwise it does
        from now on what this says, and keeps what has occurred, what runs and what is queued.

        Args:
            name: Non-empty text of at most 512 bytes.
            workflow: One of those given to `open_supervisor`, or its name.
            input: What each run gets, fixed now.
            cron: Five fields: minute, hour, day of month, month, day of week. Needs the extra `perdure[schedules]`.
            every: Instead of `cron`: seconds of elapsed time from one occurrence to the next, 0.1 or more; the first is one such
                period from now.
            timezone: Of `cron`: a name such as `Europe/Berlin`, or a `ZoneInfo`.
            overlap: What becomes of an occurrence while an earlier run has not ended: `skip` drops it, `queue` starts it
                after that (1,000 wait at most), `allow` starts it beside it.
            misfire: What becomes of occurrences that were missed, as nothing ran or was more than 60 seconds late: the latest is
                run `once`, all are left out (`skip`), or `all` are run in order (the latest 1,000).
            workflow_id: The ids of the runs: text in which `{time}` stands for the occurrence's time in UTC and `{name}` for the
                schedule's name. `{name}@{time}` unless given, as in `report@2026-11-29T08:00:00Z`.

        Raises:
            InvalidArgumentError: An argument is wrong; nothing was written.
            UnregisteredWorkflowError: The workflow was not given to `open_supervisor`.
            MissingExtraError: `cron` needs a package that is not installed.
            EncodeError: The input cannot be stored.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        check_schedule_name(name)
        registered = self._find(workflow)
        definition = define(
            registered.name,
            self._clock.now_ms(),
            cron=cron,
            every=every,
            timezone=timezone,
            overlap=overlap,
            misfire=misfire,
            workflow_id=workflow_id,
        )
        encoded = encode_input(registered.function, input, bytes_max=self._input_bytes_max)
        await self._schedules.put(name, definition, encoded)
        return ScheduleHandle(self._schedules, self._clock, name)

    @rests_with_host
    async def get_schedule(self, name: str) -> ScheduleHandle:
        """The handle of a schedule that exists.

        Raises:
            ScheduleNotFoundError: There is none.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        await self._schedules.standing(check_schedule_name(name))
        return ScheduleHandle(self._schedules, self._clock, name)

    @rests_with_host
    async def schedules(self) -> tuple[ScheduleInfo, ...]:
        """All schedules, by name.

        Raises:
            SupervisorClosedError: The supervisor is leaving its block.
        """
        return tuple(describe(standing) for standing in await self._schedules.standings())

    @rests_with_host
    async def unschedule(self, name: str) -> None:
        """Remove a schedule, and the occurrences that it has queued; durable on return. Runs that began go on.

        Raises:
            ScheduleNotFoundError: There is none.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        await self._schedules.remove(check_schedule_name(name))
