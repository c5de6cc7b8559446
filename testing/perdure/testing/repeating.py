"""The call that repeats one run of an exploration, as code to paste.

1. All that was given and matters to a single run is in it: which seeds there were, and how often a recovery dies, does not.
2. What has a name is shown by that: functions, modules, members of enumerations.
3. By which name the test knows a function, such as `shop.order`, cannot be known: what to add to the call is told in any case.
4. A call that would not be what was given is never shown: where anything cannot be written down, such as a lambda or an object of
   a class of one's own, the reader is told what to add to the call that is there.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from math import isfinite
from types import FunctionType, ModuleType
from typing import Any, Final, cast

from perdure.testing.asked import TIMEOUT_S, WRITES_MAX, Asked
from perdure.testing.differences import ASPECTS
from perdure.testing.scenario import Mail
from perdure.workflow import WorkflowState, definition_of

__all__ = ["as_code", "how_to_repeat"]

_ARGUMENT_MAX: Final = 300
_BY_REPR: Final = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    decimal.Decimal,
    uuid.UUID,
)


class _NotCodeError(Exception):
    """It cannot be written down."""


def how_to_repeat(asked: Asked, only: str) -> str:
    """What the reader is told, to repeat this run alone."""
    try:
        arguments = _arguments(asked)
    except _NotCodeError:
        return f'To repeat this run alone, add this to your call:\n  only="{only}"'
    call = f'{asked.call}({", ".join(arguments)}, only="{only}")'
    return f'To repeat this run alone, add only="{only}" to your call, or write:\n  {call}'


def as_code(value: object) -> str | None:
    """A value as an expression that makes it again, given the names of its classes; `None` where there is none."""
    try:
        return _code(value)
    except _NotCodeError:
        return None


def _arguments(asked: Asked) -> list[str]:
    positional = [_function(asked.workflow)]
    if asked.input is not None:
        positional.append(_argument(asked.input))
    named: dict[str, str] = {}
    if asked.mail:
        named["messages"] = _list(map(_mail, asked.mail))
    if asked.others:
        named["workflows"] = _list(map(_function, asked.others))
    if len(asked.ends_as) == 1 and (asked.ends_as[0] is not WorkflowState.COMPLETED or asked.cancel_at is not None):
        named["ends_as"] = repr(asked.ends_as[0].value)
    if asked.cancel_at is not None:
        named["cancel_at"] = _argument(asked.cancel_at)
    if asked.timeout != TIMEOUT_S:
        named["timeout"] = _argument(asked.timeout)
    if asked.writes_max != WRITES_MAX:
        named["writes_max"] = _argument(asked.writes_max)
    if asked.compare != ASPECTS:
        named["compare"] = _argument(list(asked.compare))
    if asked.ignore:
        named["ignore"] = _argument(list(asked.ignore))
    if asked.allows_interruptions:
        named["allow_interruptions"] = "True"
    if asked.check is not None:
        named["check"] = _argument(inspect.unwrap(asked.check))
    if asked.amnesia is None:
        named["keep_globals"] = "True"
    if asked.modules:
        named["modules"] = _argument(list(asked.modules))
    if asked.workflow_id != f"{asked.name}-1":
        named["workflow_id"] = _argument(asked.workflow_id)
    named |= {name: _argument(value) for name, value in asked.options.items()}
    return [*positional, *(f"{name}={code}" for name, code in named.items())]


def _argument(value: object) -> str:
    code = _code(value)
    if len(code) > _ARGUMENT_MAX:
        raise _NotCodeError
    return code


def _mail(mail: Mail) -> str:
    if mail == Mail(mail.name, mail.body):
        return f"({mail.name!r}, {_argument(mail.body)})"
    unusual = {"at": mail.at or None, "id": mail.id, "to": mail.to}
    said = [f"{name}={_code(value)}" for name, value in unusual.items() if value is not None]
    return f"Mail({', '.join([repr(mail.name), _argument(mail.body), *said])})"


def _function(workflow: Any) -> str:
    return _code(definition_of(workflow).function)


def _list(codes: Iterable[str]) -> str:
    return f"[{', '.join(codes)}]"


def _code(value: Any) -> str:
    kind = _class_of(value)
    if value is None or kind in (bool, int, str, bytes) or (kind is float and isfinite(value)):
        return repr(value)
    if isinstance(value, Enum):
        return _member(value)
    if kind in (list, tuple, set):
        return _several(value)
    if kind is dict:
        pairs = cast("Mapping[object, object]", value).items()
        return f"{{{', '.join(f'{_code(key)}: {_code(each)}' for key, each in pairs)}}}"
    if kind is FunctionType:
        return _known_as(cast("Callable[..., Any]", value))
    if kind is ModuleType:
        return str(value.__name__)
    if kind.__module__ in ("datetime", "decimal", "uuid") and isinstance(value, _BY_REPR):
        return repr(value)
    if dataclasses.is_dataclass(kind):
        return _dataclass(value)
    return _none()


def _member(value: Enum) -> str:
    return f"{_known_as(type(value))}.{value.name}" if value.name in type(value).__members__ else _none()


def _several(values: list[object] | tuple[object, ...] | set[object]) -> str:
    codes = [_code(each) for each in values]
    if isinstance(values, list):
        return _list(codes)
    if isinstance(values, tuple):
        return f"({', '.join(codes)}{',' if len(codes) == 1 else ''})"
    return f"{{{', '.join(sorted(codes))}}}" if codes else "set()"


def _dataclass(value: Any) -> str:
    fields = dataclasses.fields(value)
    if not all(each.init for each in fields):
        return _none()
    said = [f"{each.name}={_code(getattr(value, each.name))}" for each in fields]
    return f"{_known_as(_class_of(value))}({', '.join(said)})"


def _class_of(value: object) -> type[Any]:
    return type(value)


def _known_as(thing: Callable[..., Any] | type[Any]) -> str:
    """The name of a function or class, as the code knows it that stands beside it."""
    name = thing.__qualname__.rpartition("<locals>.")[2]
    return name if all(part.isidentifier() for part in name.split(".")) else _none()


def _none() -> str:
    raise _NotCodeError
