"""When a workflow wants to be activated, decided from what is durable of it.

1. The supervisor, which keeps the catalog behind live workflows, and a rebuild, which makes it anew from their files, ask
   this one function; so a rebuilt catalog says what the lost one did.
2. What is not understood (a state of tomorrow) is activated at once: too early is harmless, too late is not.
"""

from __future__ import annotations

from typing import Final

__all__ = ["TERMINAL_STATES", "wake_of"]

TERMINAL_STATES: Final = frozenset({"completed", "failed", "cancelled"})
"""The states in which a workflow has ended, as they are stored."""


def wake_of(state: str, alarm_ms: int | None, *, wants_mail: bool, has_duties: bool = False) -> int | None:
    """When a workflow is to be activated next.

    Args:
        state: Its stored state.
        alarm_ms: Its alarm, in milliseconds since the epoch, or `None`.
        wants_mail: Whether it has mail that it waits for, or of which that is not known.
        has_duties: Whether it still owes something to others, which is done at once, whether it has ended or not.

    Returns:
        Milliseconds since the epoch, 0 for "at once", `None` for never.
    """
    if has_duties:
        return 0
    if state in TERMINAL_STATES:
        return None
    if state == "sleeping":
        return 0 if wants_mail else alarm_ms
    if state in ("pending", "rolling_back"):
        # It waits for its start, or for a handler's next attempt, and for no message; without an alarm, for nothing.
        return alarm_ms or 0
    return 0
