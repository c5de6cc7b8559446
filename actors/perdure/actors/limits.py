"""How many workflows of one type may be at work, and how many may begin in a time: what users say, and the counting.

1. A workflow is *at work* from the moment at which it is let begin until it has ended. One that sleeps or waits is at work:
   what it has done is not undone by waiting, and a limit that let others in meanwhile would be exceeded when it wakes.
2. In every span of `per` seconds at most `rate` begin. Beginnings are counted one by one; a bucket that fills while nobody
   comes would let in nearly twice as many.
3. A clock that was set back does not lengthen a wait: a beginning counts as now at the latest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from perdure.workflow import InvalidArgumentError, Workflow, definition_of
from perdure.workflow.checks import check_count, check_duration, ms_ceil

__all__ = ["Beginnings", "WorkflowLimit", "check_limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowLimit:
    """A limit for the workflows of one type; give at least one of `concurrency` and `rate`.

    Attributes:
        concurrency: How many may be at work at a time, 1 or more: begun and not ended, those that sleep or wait included. `None`
            for any number.
        rate: How many may begin in each span of `per` seconds, 1 or more. `None` for any number.
        per: Seconds, more than 0.

    Raises:
        InvalidArgumentError: It limits nothing, or a number is out of its range.
    """

    concurrency: int | None = None
    rate: int | None = None
    per: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.concurrency is None and self.rate is None:
            raise InvalidArgumentError(
                "a limit without concurrency= and rate= limits nothing; write WorkflowLimit(concurrency=5)"
            )
        if self.concurrency is not None:
            check_count(self.concurrency, "concurrency", least=1, example="WorkflowLimit(concurrency=5)")
        if self.rate is not None:
            check_count(self.rate, "rate", least=1, example="WorkflowLimit(rate=10, per=60.0)")
        if check_duration(self.per, "per", "WorkflowLimit(rate=10, per=60.0)") == 0:
            raise InvalidArgumentError("per must be more than 0 seconds; write WorkflowLimit(rate=10, per=60.0)")

    @property
    def per_ms(self) -> int:
        """The span in milliseconds."""
        return ms_ceil(self.per)


def check_limits(limits: object, definitions: Mapping[str, Workflow[Any, Any]]) -> dict[str, WorkflowLimit]:
    """The limits by the names of their workflows, which must be registered.

    Raises:
        InvalidArgumentError: It is no such mapping, or names another workflow.
    """
    example = 'limits={order: WorkflowLimit(concurrency=5)} or limits={"order": WorkflowLimit(concurrency=5)}'
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise InvalidArgumentError(f"limits= takes a mapping, not {type(limits).__name__}; write {example}")
    checked: dict[str, WorkflowLimit] = {}
    for key, limit in cast("Mapping[object, object]", limits).items():
        name = key if isinstance(key, str) else definition_of(key).name
        if name not in definitions:
            raise InvalidArgumentError(f"limits= names {name!r}, which is not in workflows=; write {example}")
        if not isinstance(limit, WorkflowLimit):
            raise InvalidArgumentError(f"the limit of {name!r} is no WorkflowLimit but {limit!r}; write {example}")
        if name in checked:
            raise InvalidArgumentError(f"limits= names {name!r} twice; write {example}")
        checked[name] = limit
    return checked


class Beginnings:
    """The recent beginnings of a type with a rate limit, numbered in their order.

    Args:
        rate: How many may be in a span.
        per_ms: The span.
        recent: What is stored: number and time of each, ascending.
    """

    def __init__(self, rate: int, per_ms: int, recent: list[tuple[int, int]]) -> None:
        self._rate = rate
        self._per_ms = per_ms
        self._numbers = [number for number, _ in recent]
        self._times = [time_ms for _, time_ms in recent]
        for index in range(len(recent) - 2, -1, -1):  # none began after the next one: the clock was set back in between
            self._times[index] = min(self._times[index], self._times[index + 1])
        self.next_number: int = recent[-1][0] + 1 if recent else 0

    def free(self, now_ms: int) -> int:
        """How many may begin now."""
        self._clamp(now_ms)
        return max(0, self._rate - (len(self._times) - self._expired_count(now_ms)))

    def next_ms(self, now_ms: int) -> int:
        """When another may begin; at most `now_ms` if one may now."""
        self._clamp(now_ms)
        if len(self._times) < self._rate:
            return now_ms
        return self._times[-self._rate] + self._per_ms

    def add(self, count: int, now_ms: int) -> None:
        """Note beginnings; they are durable by now."""
        self._clamp(now_ms)
        self._numbers += range(self.next_number, self.next_number + count)
        self._times += [now_ms] * count
        self.next_number += count

    def expired(self, now_ms: int) -> int:
        """The number of the earliest that still counts: those before it need not be kept."""
        self._clamp(now_ms)
        count = self._expired_count(now_ms)
        return self._numbers[count] if count < len(self._numbers) else self.next_number

    def forget_before(self, number: int) -> None:
        """Keep no beginning before this one."""
        count = bisect_left(self._numbers, number)
        del self._numbers[:count], self._times[:count]

    def _expired_count(self, now_ms: int) -> int:
        return bisect_right(self._times, now_ms - self._per_ms)  # they ascend, so this is cheap whatever the rate

    def _clamp(self, now_ms: int) -> None:
        if self._times and self._times[-1] > now_ms:
            self._times = [min(time_ms, now_ms) for time_ms in self._times]
