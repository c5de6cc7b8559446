"""A question for workflows, as plain data that both stores understand.

1. Every condition that is given holds; one that is `None`, or empty, is not given.
2. What cannot be an attribute finds nothing by mistake: it is refused as it would be for a workflow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from perdure.storage.attributes import Scalar, attribute_text, check_attributes
from perdure.storage.store import CatalogRow

__all__ = ["Question"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked for; every condition that is given holds.

    Attributes:
        states: One of these states; `None` for any.
        workflow_type: This type.
        created_before_ms: Made before this time.
        attributes: All of these attributes, values compared with their types.
        parent_id: Children of this workflow.
        has_problem: Only rows with a problem, or only rows without.
        after: After the row made at this time (milliseconds since the epoch) with this id.
    """

    states: frozenset[str] | None = None
    workflow_type: str | None = None
    created_before_ms: int | None = None
    attributes: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    parent_id: str | None = None
    has_problem: bool | None = None
    after: tuple[int, str] | None = None

    @classmethod
    def of(
        cls,
        state: str | Collection[str] | None = None,
        workflow_type: str | None = None,
        created_before_ms: int | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        parent_id: str | None = None,
        has_problem: bool | None = None,
        after: tuple[int, str] | None = None,
    ) -> Question:
        """What `Store.list_rows` is asked.

        Raises:
            InvalidAttributeError: What is searched for can be no attribute.
        """
        return cls(
            states=None if state is None else frozenset({state} if isinstance(state, str) else state),
            workflow_type=workflow_type,
            created_before_ms=created_before_ms,
            attributes=check_attributes(attributes) if attributes else {},
            parent_id=parent_id,
            has_problem=has_problem,
            after=after,
        )

    def matches(self, row: CatalogRow) -> bool:
        """Whether a row is part of the answer."""
        return (
            (self.states is None or row.state in self.states)
            and (self.workflow_type is None or row.workflow_type == self.workflow_type)
            and (self.created_before_ms is None or row.created_at_ms < self.created_before_ms)
            and (self.parent_id is None or row.parent_id == self.parent_id)
            and (self.has_problem is None or (row.problem is not None) is self.has_problem)
            and (self.after is None or (row.created_at_ms, row.workflow_id) > self.after)
            and all(
                name in row.attributes and attribute_text(row.attributes[name]) == attribute_text(value)
                for name, value in self.attributes.items()
            )
        )
