"""Values typed by annotation: what is stored is plain data, what the code gets is the type that it says.

1. The typed value is made from the stored bytes, on the first run as on every replay, so both agree in value and type.
2. A value is checked against its annotation before it is recorded (`ValueTypeError`): what was recorded can be read back.
   If it cannot, the code has changed: a fault (`StoredValueError`), never a failure.
3. Without an annotation that says something (`annotations.py`) values are plain data, and cost nothing here. A scalar of
   exactly the annotated type costs a comparison. Everything else is cattrs' work (`structure.py`), which is imported then.
4. What was found is remembered, by function and by annotation, since resolving an annotation takes longer than replaying a
   step. In bounded number: at the limit all is let go, with the classes it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from types import CodeType, FunctionType, UnionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin
from uuid import UUID

from perdure import storage
from perdure.storage import decode_value, encode_value
from perdure.workflow.annotations import (
    break_annotation,
    function_of,
    means_the_same_everywhere,
    parameter_annotation,
    raw_annotations,
    return_annotation,
    state_annotation,
)
from perdure.workflow.errors import InvalidArgumentError, StoredValueError, ValueTypeError
from perdure.workflow.plain import to_plain

if TYPE_CHECKING:
    from perdure.workflow.structure import Misfit, Reader

__all__ = [
    "Converter",
    "breaks",
    "converter_of",
    "decode",
    "decode_input",
    "decode_output",
    "encode_input",
    "returns",
    "round_trip",
    "states",
    "wanted",
]

_CONVERTERS_MAX: Final = 1024
_KNOWN_MAX: Final = 4096

_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, Decimal, UUID, datetime, date, Fraction})
"""Types that come back from storage as they are."""

_PLAIN_CONTAINERS: Final = frozenset(
    {list, dict, set, tuple, frozenset, Sequence, Mapping, Iterable, Collection, Union, UnionType}
)


class Converter:
    """Between values of one annotated type and their stored form.

    Attributes:
        annotation: The type.
    """

    __slots__ = ("_exact", "_lenient", "_strict", "_to_plain", "annotation")

    def __init__(self, annotation: Any) -> None:
        self.annotation: Any = annotation
        self._exact: Any = annotation if any(annotation is kind for kind in _PLAIN) else None
        # In plain containers an object of an unknown class is refused, as it is without annotation.
        self._to_plain = None if _is_plain(annotation) else to_plain
        self._strict: Reader | None = None
        self._lenient: Reader | None = None
        if self._exact is None:
            self._strict = _make_reader(annotation, strict=True)

    def round_trip(self, value: object, *, bytes_max: int, what: str, root: str) -> tuple[bytes | None, Any]:
        """The value's stored form (`None` for `None`), and what a replay will give for it.

        Args:
            value: What to store.
            bytes_max: Most bytes that its stored form may have.
            what: How errors name it, for example "the result of step 'charge'".
            root: Where paths in it begin, for example "result".

        Raises:
            ValueTypeError: It does not fit the annotation.
            EncodeError: It cannot be stored.
        """
        if type(value) is self._exact:
            return storage.round_trip(value, bytes_max=bytes_max, what=what)
        if value is None:
            return None, self._read(None, what, root, ValueTypeError)
        if self._to_plain is None:
            data, plain = storage.round_trip(value, bytes_max=bytes_max, what=what)
            return data, self._read(plain, what, root, ValueTypeError)
        plain = self._to_plain(value)  # often it is enough, and quick to encode
        data = encode_value(plain, bytes_max=bytes_max, what=what, to_plain=self._to_plain)
        return data, self._read(decode_value(data), what, root, ValueTypeError)

    def decode(self, data: bytes | None, *, what: str, root: str) -> Any:
        """The value for its stored form.

        Raises:
            StoredValueError: It does not fit the annotation.
            DecodeError: It is damaged.
        """
        value = None if data is None else decode_value(data)
        return value if type(value) is self._exact else self._read(value, what, root, StoredValueError)

    def convert(self, value: object, *, what: str, root: str) -> Any:
        """The typed value for plain data that came from elsewhere, such as a message's body.

        Raises:
            ValueTypeError: It does not fit the annotation.
        """
        return value if type(value) is self._exact else self._read(value, what, root, ValueTypeError, strict=False)

    def _read(
        self,
        value: object,
        what: str,
        root: str,
        error: type[ValueTypeError | StoredValueError],
        *,
        strict: bool | None = None,
    ) -> Any:
        read = self._reader(strict=error is ValueTypeError if strict is None else strict)
        try:
            return read(value)
        except Exception as misfit:
            from perdure.workflow.structure import Misfit, type_text  # here, as importing takes a part of reading

            if not isinstance(misfit, Misfit):
                raise
            raise _error(error, misfit, what, root, type_text(self.annotation)) from misfit.__cause__

    def _reader(self, *, strict: bool) -> Reader:
        if strict:
            if self._strict is None:
                self._strict = _make_reader(self.annotation, strict=True)
            return self._strict
        if self._lenient is None:
            self._lenient = _make_reader(self.annotation, strict=False)
        return self._lenient


def _error(
    error: type[ValueTypeError | StoredValueError], misfit: Misfit, what: str, root: str, annotation: str
) -> ValueTypeError | StoredValueError:
    path = f"{root}{misfit.path}"
    text = f"{what} does not fit its annotation {annotation}: {path} {misfit.reason}"
    if error is StoredValueError:
        text += ". History keeps it; give the annotation back the form that it had, or let it take both"
    return error(text, path=path, expected=misfit.expected, found=misfit.found)


def _is_plain(annotation: Any) -> bool:
    """Whether an annotation names nothing but plain data."""
    origin = get_origin(annotation)
    if origin is None:
        return (
            annotation in _PLAIN
            or annotation in _PLAIN_CONTAINERS
            or annotation in (Any, object, Ellipsis)
            or isinstance(annotation, TypeVar)
        )
    return origin in _PLAIN_CONTAINERS and all(map(_is_plain, get_args(annotation)))


def _make_reader(annotation: Any, *, strict: bool) -> Reader:
    from perdure.workflow.structure import make_reader, type_text

    try:
        return make_reader(annotation, strict=strict)
    except Exception as error:
        raise InvalidArgumentError(
            f"values cannot be typed by the annotation {type_text(annotation)}: {error}. Annotate with types whose names can "
            "be found at run time, tell the classes of a union apart by a Literal field, or leave the annotation out"
        ) from error


_converters: Final[dict[Any, Converter]] = {}


def converter_of(annotation: Any) -> Converter:
    """The converter for an annotation that says something.

    Raises:
        InvalidArgumentError: No value can be made by it.
    """
    try:
        converter = _converters.get(annotation)
    except TypeError:  # `Annotated` with something that cannot be hashed
        return Converter(annotation)
    if converter is None:
        if len(_converters) >= _CONVERTERS_MAX:
            _forget()
        converter = _converters[annotation] = Converter(annotation)
    return converter


def _forget() -> None:
    from perdure.workflow.structure import forget

    _converters.clear()
    _known.clear()
    forget()


class _Known(NamedTuple):
    """What a function's annotations were found to say. What it is known by is held, so that none is another's."""

    code: CodeType
    namespace: dict[str, Any]
    annotations: Any
    converter: Converter | None


_known: Final[dict[tuple[int, str], _Known]] = {}
"""By the identity of a function's code: steps are often functions made anew on every run."""


def returns(fn: Callable[..., Any]) -> Converter | None:
    """The converter for what a function returns, or `None` where its annotation says nothing of it.

    Raises:
        InvalidArgumentError: The annotation cannot be used.
    """
    function = fn if type(fn) is FunctionType else function_of(fn)
    if not isinstance(function, FunctionType):
        return _find(function, return_annotation)
    annotation = raw_annotations(function).get("return")
    if annotation is None:
        return None
    return _recall(function, function, "return", annotation, return_annotation)


def wanted(annotation: Any) -> Converter | None:
    """The converter for a type that was asked for by itself, as `type=` of a queue read.

    Raises:
        InvalidArgumentError: It is no type, or no value can be made by it.
    """
    return None if annotation is None or annotation is Any or annotation is object else converter_of(annotation)


def states(body: Callable[..., Any]) -> Converter | None:
    """The converter for the state of a loop."""
    return _of_body(body, "state", state_annotation)


def breaks(body: Callable[..., Any]) -> Converter | None:
    """The converter for what a loop breaks with."""
    return _of_body(body, "break", break_annotation)


def _of_body(body: Callable[..., Any], what: str, find: Callable[[Callable[..., Any]], Any]) -> Converter | None:
    if type(body) is not FunctionType:
        return _find(body, find)
    return _recall(body, body, what, tuple(raw_annotations(body).values()), find)


def _recall(
    fn: Callable[..., Any],
    function: FunctionType,
    what: str,
    annotations: Any,
    find: Callable[[Callable[..., Any]], Any],
) -> Converter | None:
    key = (id(function.__code__), what)
    known = _known.get(key)
    if (
        known is not None
        and (known.annotations is annotations or known.annotations == annotations)
        and known.code is function.__code__
        and known.namespace is function.__globals__
    ):
        return known.converter
    converter = _find(fn, find)
    if means_the_same_everywhere(function, annotations):
        if len(_known) >= _KNOWN_MAX:
            _known.clear()
        _known[key] = _Known(function.__code__, function.__globals__, annotations, converter)
    return converter


def _find(fn: Callable[..., Any] | None, find: Callable[[Callable[..., Any]], Any]) -> Converter | None:
    annotation = None if fn is None else find(fn)
    return None if annotation is None else converter_of(annotation)


def round_trip(
    converter: Converter | None, value: object, *, bytes_max: int, what: str, root: str
) -> tuple[bytes | None, Any]:
    """`Converter.round_trip`, and the same for plain data where there is no converter."""
    if converter is not None:
        return converter.round_trip(value, bytes_max=bytes_max, what=what, root=root)
    return (None, None) if value is None else storage.round_trip(value, bytes_max=bytes_max, what=what)


def decode(converter: Converter | None, data: bytes | None, *, what: str, root: str) -> Any:
    """`Converter.decode`, and the same for plain data where there is no converter."""
    if converter is not None:
        return converter.decode(data, what=what, root=root)
    return None if data is None else decode_value(data)


# The input and the output of a workflow.


def _inputs(function: Callable[..., Any] | None) -> Converter | None:
    return None if function is None else _of_body(function, "input", _input_annotation)


def _input_annotation(function: Callable[..., Any]) -> Any:
    return parameter_annotation(function, 1)


def encode_input(function: Callable[..., Any] | None, value: object, *, bytes_max: int) -> bytes:
    """The stored form of a workflow's input; plain data where its function is not known.

    Raises:
        InvalidArgumentError: It does not fit the annotation of the function's second parameter; its `__cause__` is the
            `ValueTypeError` that says where.
        EncodeError: It cannot be stored.
    """
    try:
        data, _ = round_trip(_inputs(function), value, bytes_max=bytes_max, what="the workflow's input", root="input")
    except ValueTypeError as misfit:
        raise InvalidArgumentError(misfit.message) from misfit
    return encode_value(None) if data is None else data


def decode_input(function: Callable[..., Any], data: bytes | None) -> Any:
    """A workflow's input for its stored form.

    Raises:
        StoredValueError: It does not fit the annotation that the function has now.
    """
    return decode(_inputs(function), data, what="the workflow's stored input", root="input")


def decode_output(function: Callable[..., Any] | None, data: bytes | None) -> Any:
    """A workflow's output for its stored form; plain data where its function is not known.

    Raises:
        StoredValueError: It does not fit the annotation that the function has now.
    """
    converter = None if function is None else returns(function)
    return decode(converter, data, what="the workflow's stored output", root="output")
