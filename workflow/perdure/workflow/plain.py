"""From objects that know their own fields to plain data, one level at a time: dataclasses, enums, attrs and pydantic classes.

1. The value decides, not the annotation: what is stored is all that the object holds, so a value that is more than its
   annotation says is found when it is read back against it (`structure.py`), before it is recorded.
2. attrs and pydantic are never imported here: whoever hands over an object of theirs has imported them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from enum import Enum
from typing import Any, cast

__all__ = ["is_pydantic_model", "to_plain"]


def to_plain(item: object) -> object:
    """The object's content as plain data, its parts as they are; the object itself if it is none of these kinds."""
    kind: Any = type(item)
    if isinstance(item, Enum):
        return item.value
    if isinstance(item, type):
        return item
    if dataclasses.is_dataclass(item):
        return _fields(item, dataclasses.fields(item))
    if hasattr(kind, "__attrs_attrs__"):
        return _fields(item, kind.__attrs_attrs__)
    if is_pydantic_model(kind):
        return cast("Any", item).model_dump(mode="python", round_trip=True, warnings=False)
    return item


def _fields(item: object, fields: Iterable[Any]) -> dict[str, object]:
    # One that is not given to the constructor need not be there.
    return {field.name: getattr(item, field.name) for field in fields if field.init or hasattr(item, field.name)}


def is_pydantic_model(kind: object) -> bool:
    """Whether it is a pydantic model class. If it is, somebody has imported pydantic."""
    pydantic = sys.modules.get("pydantic")
    model = getattr(pydantic, "BaseModel", None)
    return model is not None and isinstance(kind, type) and issubclass(kind, model)
