"""Finding out that a call would wait for itself: the chain of workflows, each of which waits for the next.

1. Only a call that joins what exists can close a cycle; a child that was just made waits for nobody.
2. A call in a branch of a race is no link: the race may end without it.
3. Each workflow on the way is looked at by itself, for a moment. Whoever joins does so alone (`hosting.py`), and with its open
   call recorded, so of two that join each other at once the later one sees the earlier.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from perdure.actors.errors import SupervisorClosedError
from perdure.storage import PerdureError

if TYPE_CHECKING:
    from perdure.actors.residents import Residents

__all__ = ["find_chain"]


async def find_chain(
    residents: Residents, caller_id: str, child_id: str, ignored: Mapping[str, Container[str]]
) -> tuple[str, ...] | None:
    """The chain that begins with the caller's call of the child and leads back to the caller.

    Args:
        residents: Where the workflows are.
        caller_id: Who calls.
        child_id: Whom.
        ignored: By workflow, the entry ids of calls that are about to fail.

    Returns:
        The ids in order, the caller's first and last; `None` if there is no such chain.

    Raises:
        SupervisorClosedError: The supervisor is leaving its block.
    """
    before: dict[str, str] = {child_id: caller_id}
    stack = [child_id]
    while stack:
        current = stack.pop()
        if current == caller_id:
            chain = [caller_id, before[caller_id]]
            while chain[-1] != caller_id:
                chain.append(before[chain[-1]])
            return tuple(reversed(chain))
        for following in await _awaited_by(residents, current, ignored.get(current, ())):
            if following not in before:
                before[following] = current
                stack.append(following)
    return None


async def _awaited_by(residents: Residents, workflow_id: str, ignored: Container[str]) -> list[str]:
    try:
        async with residents.using(workflow_id) as actor:
            history = actor.activation.history
            return [] if history.state.is_terminal else history.calls.required(ignored)
    except SupervisorClosedError:
        raise
    except PerdureError:  # it is gone, or damaged: it waits for nobody that could be told
        return []
