"""What a workflow is given when it is made, beside its function and its input.

It is plain data that is written in the workflow's first batch, so that a workflow never exists without it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NOTHING_SPECIAL", "Birth"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """What is said once, at the making of a workflow.

    Attributes:
        start_at_ms: Before this time (milliseconds since the epoch) nothing runs, unless the workflow is woken. `None`: at once.
        deadline_ms: At this time the workflow fails, unless it has ended. `None`: never.
        attributes: The CBOR map by which it can be found, or `None` for no attributes.
        created_at_ms: When it is made, for a host that keeps an order; `None` stores none.
        parent: The CBOR reference of the workflow that called it, or `None`.
    """

    start_at_ms: int | None = None
    deadline_ms: int | None = None
    attributes: bytes | None = None
    parent: bytes | None = None
    created_at_ms: int | None = None


NOTHING_SPECIAL = Birth()
"""A workflow that starts at once, for ever, found by its id, called by nobody."""
