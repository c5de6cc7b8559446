"""What this process found wrong with single workflows, and since when.

1. One entry for each workflow that cannot run, with what was raised last; it goes when the workflow runs again, has ended or
   was deleted. So it is bounded by the workflows that are at fault.
2. `since_ms` is when that was found last: it is found again whenever the workflow is tried again.
"""

from __future__ import annotations

from perdure.workflow.clock import Clock

__all__ = ["Troubles"]


class Troubles(dict[str, BaseException]):
    """The errors of the workflows that cannot run, by id.

    Args:
        clock: The time.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._since_ms: dict[str, int] = {}

    def __setitem__(self, workflow_id: str, error: BaseException) -> None:
        self._since_ms[workflow_id] = self._clock.now_ms()
        super().__setitem__(workflow_id, error)

    def clear_of(self, workflow_id: str) -> None:
        """The workflow is not in trouble any more."""
        super().pop(workflow_id, None)
        self._since_ms.pop(workflow_id, None)

    def since_ms(self, workflow_id: str) -> int:
        """When that was found, in milliseconds since the epoch; only for one that is here."""
        return self._since_ms[workflow_id]
