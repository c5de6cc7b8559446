"""Values typed by annotation: what the code gets is the type that it says, the same on the first run and on replay."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Protocol, Self, TypedDict, TypeVar
from uuid import UUID

import attrs
import pydantic
import pytest
from harness import Namespace, host
from trio.testing import MockClock

from perdure.storage import EncodeError, encode_value
from perdure.workflow import (
    Context,
    InvalidArgumentError,
    RunMode,
    StepCriticalError,
    StoredValueError,
    WorkflowFailedError,
    WorkflowState,
    typed,
)
from perdure.workflow.typed import converter_of, returns

T = TypeVar("T")
NOW = datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=UTC)
KEY = UUID("12345678-1234-5678-8234-567812345678")

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


class Color(enum.Enum):
    RED = "red"
    MIXED = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Name(str):
    __slots__ = ()


class Size(enum.StrEnum):
    BIG = "big"


class Point(NamedTuple):
    x: int
    y: Decimal


class Options(TypedDict, total=False):
    color: Color
    limit: int


@dataclass(frozen=True)
class Item:
    sku: str
    price: Decimal
    color: Color = Color.RED


@dataclass
class Order:
    id: UUID
    items: list[Item]
    placed: datetime
    due: date | None = None
    notes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    total: Decimal = field(init=False)

    def __post_init__(self) -> None:
        self.total = sum((item.price for item in self.items), Decimal())


@dataclass(frozen=True)
class Tree:
    name: str
    children: list["Tree"] = field(default_factory=list["Tree"])  # noqa: UP037 - quoted within a type is the point


@dataclass
class Page(Generic[T]):
    entries: list[T]
    more: bool


@dataclass
class Card:
    kind: Literal["card"]
    number: str


@dataclass
class Cash:
    kind: Literal["cash"]
    amount: int


@attrs.define
class Account:
    owner: str
    _secret: bytes
    limit: int = attrs.field(default=1, converter=int)


class Customer(pydantic.BaseModel):
    name: str = pydantic.Field(alias="fullName")
    color: Color
    address: Item | None = None

    @pydantic.computed_field
    @property
    def shout(self) -> str:
        return self.name.upper()


class Shaped(Protocol):
    def area(self) -> float: ...


class Sku(pydantic.RootModel[str]):
    pass


UserId = NewType("UserId", int)
ITEM = Item("a", Decimal("1.10"), Color.MIXED)
RED_ITEM = Item("r", Decimal(3))
ORDER = Order(KEY, [ITEM, Item("b", Decimal(2))], NOW, date(2024, 3, 1), {"x": (1, 2)})

ORDER_PLAIN = {
    "id": KEY,
    "items": [
        {"sku": "a", "price": Decimal("1.10"), "color": [1, 2]},
        {"sku": "b", "price": Decimal(2), "color": "red"},
    ],
    "placed": NOW,
    "due": date(2024, 3, 1),
    "notes": {"x": [1, 2]},
    "total": Decimal("3.10"),
}

TYPED: dict[str, tuple[Any, Any]] = {
    "dataclass": (Order, ORDER),
    "recursive": (Tree, Tree("a", [Tree("b"), Tree("c", [Tree("d")])])),
    "generic": (Page[Item], Page([ITEM], True)),
    "generic, bare": (Page, Page([1], False)),
    "enum": (Color, Color.MIXED),
    "int enum": (Level, Level.LOW),
    "text enum": (dict[Size, Size], {Size.BIG: Size.BIG}),
    "subclass of a scalar": (list[Name], [Name("a")]),
    "flag": (Access, Access.READ | Access.WRITE),
    "named tuple": (Point, Point(1, Decimal("2.50"))),
    "typed dict": (Options, {"color": Color.RED}),
    "attrs": (Account, Account("me", b"\x00", 3)),
    "pydantic": (Customer, Customer(fullName="Ann", color=Color.RED, address=RED_ITEM)),
    "pydantic root": (list[Sku], [Sku("a")]),
    "decimal": (Decimal, Decimal("1.10")),
    "uuid": (UUID, KEY),
    "datetime": (datetime, NOW),
    "date": (date, date(2024, 2, 29)),
    "tuple": (tuple[int, str], (1, "a")),
    "tuple of any length": (tuple[Item, ...], (ITEM, ITEM)),
    "empty tuple": (tuple[()], ()),
    "bare tuple": (tuple, (1, "a")),
    "set": (set[Level], {Level.LOW}),
    "frozenset of classes": (frozenset[Item], frozenset({ITEM})),
    "keys": (dict[Item, dict[Color, Point]], {ITEM: {Color.MIXED: Point(0, Decimal(1))}}),
    "mapping": (Mapping[str, Sequence[Point]], {"a": [Point(1, Decimal(1))]}),
    "optional": (Order | None, ORDER),
    "optional none": (Order | None, None),
    "union of scalars": (list[int | float | str | None], [1, 1.0, "1", None]),
    "union of kinds": (list[Item | list[Item] | int | Color], [ITEM, [ITEM], 1, Color.RED]),
    "union of classes": (list[Card | Cash], [Card("card", "1"), Cash("cash", 2)]),
    "literal": (Literal[1, "a"], 1),
    "new type": (UserId, 7),
    "annotated": (Annotated[Point, "where"], Point(1, Decimal(1))),
    "float": (float, 1.5),
    "bytearray": (bytearray, bytearray(b"ab")),
    "plain": (dict[str, Any], {"a": [1, {"b": None}]}),
}


def returning(annotation: Any, value: Any, name: str = "step") -> Callable[[], Awaitable[Any]]:
    """A step function whose annotation is a value."""

    async def work() -> Any:
        calls.append(name)
        return value

    work.__annotations__["return"] = annotation
    return work


def form(value: Any) -> Any:
    """The value with the types of everything in it."""
    if isinstance(value, dict):
        return dict, [(form(key), form(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [form(item) for item in value]
    return type(value), value


@pytest.mark.parametrize("kind", TYPED)
async def test_a_step_returns_the_annotated_type_on_the_first_run_and_on_replay(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, kind: str
) -> None:
    """S8: and changing what came back changes no history."""
    annotation, value = TYPED[kind]
    seen: list[Any] = []

    async def workflow(ctx: Context, _: object) -> None:
        seen.append(await ctx.step("make", returning(annotation, value)))
        seen.append(await ctx.step("again", returning(annotation, value), ephemeral=True))
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        recorded = await namespace.dump()
        await process.restart()
        await process.stop(workflow)
        await process.restart()
        assert await namespace.dump() == recorded, "replay wrote something"
        await process.send("go")
        await process.finish(workflow)
    assert len(seen) == 6
    for got in seen:
        assert form(got) == form(value)
    assert calls == ["step", "step"]


class Finder:
    async def __call__(self) -> Item:
        return ITEM


class Shop:
    async def find(self) -> Item:
        return ITEM

    def find_now(self) -> Item:
        return ITEM


async def find(sku: str, *, price: str) -> Item:
    return Item(sku, Decimal(price), Color.MIXED)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "partial": partial(partial(find, price="1.10"), "a"),
    "bound method": Shop().find,
    "plain method": Shop().find_now,
    "callable object": Finder(),
    "class": Item,
    "partial of a class": partial(Item, "a", Decimal("1.10"), Color.MIXED),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_annotation_is_found_on_every_kind_of_function(kind: str) -> None:
    """S8: partials, methods, objects with `__call__`, and a class, whose instance it returns."""
    converter = returns(FUNCTIONS[kind])
    assert converter is not None
    assert converter.annotation is Item


async def test_a_class_of_the_enclosing_function_is_found_anew_on_every_run(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: the type is that of the run's own class."""
    seen: list[bool] = []

    async def workflow(ctx: Context, _: object) -> None:
        @dataclass
        class Local:
            x: int

        async def work() -> Local:
            return Local(1)

        assert work.__annotations__["return"] == "Local"
        seen.append(type(await ctx.step("make", work)) is Local)
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        await process.finish(workflow)
    assert seen == [True, True]


@pytest.mark.parametrize("annotation", [None, Any, object, T, "Unknown", "list[Unknown]", "not a type at all"])
async def test_an_annotation_that_says_nothing_leaves_plain_data(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, annotation: Any
) -> None:
    """S8: also one whose names cannot be found when the workflow runs."""
    seen: list[Any] = []

    async def workflow(ctx: Context, _: object) -> None:
        seen.append(await ctx.step("make", returning(annotation, (1, {"a": (2,)}))))
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        await process.finish(workflow)
    assert seen == [[1, {"a": [2]}]] * 2


MISFITS: dict[str, tuple[Any, Any, str, str]] = {
    "scalar": (int, "1", "result should be int, but is str", "result"),
    "bool": (int, True, "result should be int, but is bool", "result"),
    "none": (Item, None, "result should be Item, but is None", "result"),
    "field": (Item, Item("a", 1), "result.price should be Decimal, but is int", "result.price"),
    "nested": (
        dict[str, Order],
        {"k": Order(KEY, [ITEM, Item(1, Decimal(1))], NOW)},
        "result['k'].items[1].sku should be str, but is int",
        "result['k'].items[1].sku",
    ),
    "optional": (Order | None, Order(KEY, [], 5), "result.placed should be datetime, but is int", "result.placed"),
    "missing": (Item, {"sku": "a"}, "result.price is missing", "result.price"),
    "text for a list": (list[str], "abc", "result should be list[str], but is str", "result"),
    "list for a set": (set[int], [1], "result should be set[int], but is list", "result"),
    "length": (tuple[int, str], (1,), "result should be tuple[int, str], but is 1 items", "result"),
    "named tuple": (list[Point], [Point(1, 2.5)], "result[0].y should be Decimal, but is float", "result[0].y"),
    "typed dict": (Options, {"limit": "x"}, "result.limit should be int, but is str", "result.limit"),
    "attrs": (Account, Account("me", "x"), "result._secret should be bytes, but is str", "result._secret"),
    "pydantic": (
        list[Customer],
        [{"fullName": 1, "color": "red"}],
        "result[0].fullName was refused",
        "result[0].fullName",
    ),
    "enum": (dict[str, Color], {"c": "blue"}, "result['c'] should be Color, but is 'blue'", "result['c']"),
    "literal": (Literal[1], True, "result should be Literal[1], but is True", "result"),
    "union": (int | str, 1.5, "result should be int | str, but is float", "result"),
    "union of classes": (Card | Cash, Card("card", 5), "result.number should be str, but is int", "result.number"),
    "more than it says": (Tree, Order(KEY, [], NOW), "result.name is missing", "result.name"),
    "float": (float, 2**53 + 1, "result is an integer that no float can hold exactly", "result"),
}


@pytest.mark.parametrize("kind", MISFITS)
async def test_a_result_that_does_not_fit_fails_its_step_at_once_naming_path_and_field(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, kind: str
) -> None:
    """S8, S9: a critical failure, the same on replay; the function runs once."""
    annotation, value, text, path = MISFITS[kind]
    seen: list[Any] = []

    async def workflow(ctx: Context, _: object) -> str:
        try:
            await ctx.step("make", returning(annotation, value))
        except StepCriticalError as error:
            seen.append((str(error), error.error.name, error.error.metadata.get("path"), error.attempts))
        await ctx.queue.next("wait", names=["go"])
        return "went on"

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == "went on"
    assert calls == ["step"]
    assert seen[0] == seen[1]
    assert text in seen[0][0]
    assert "step 'make'" in seen[0][0]
    assert seen[0][1:] == ("ValueTypeError", path, 1)


async def test_a_field_that_the_annotation_does_not_know_is_not_lost_silently(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: an instance of a subclass would come back as less than it was."""

    @dataclass(frozen=True)
    class Gift(Item):
        wrapped: bool = True

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.step("make", returning(list[Item], [Gift("a", Decimal(1))]))

    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError, match=r"result\[0\]\.wrapped is no field of Item, and would be lost"):
            await process.finish(workflow)
        assert (await namespace.snapshot()).state is WorkflowState.FAILED


async def test_an_annotation_that_cannot_be_used_is_a_fault_before_the_step_runs(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S9: nothing is recorded, and with right code the workflow goes on."""

    @dataclass
    class One:
        x: int

    @dataclass
    class Other:
        x: int

    annotations: list[Any] = [One | Other, One]
    seen: list[Any] = []

    async def workflow(ctx: Context, _: object) -> None:
        seen.append(await ctx.step("make", returning(annotations[0], One(1))))

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match="tell the classes of a union apart"):
            await process.finish(workflow)
        assert (calls, await namespace.entries()) == ([], {})
        del annotations[0]
        await process.restart()
        await process.finish(workflow)
    assert seen == [One(1)]


async def test_a_recorded_value_that_no_longer_fits_is_a_fault_and_old_code_goes_on(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4, S8: the code changed its annotation; the workflow is neither failed nor rolled back."""
    annotations: list[Any] = [dict[str, list[int]]]
    seen: list[Any] = []

    async def workflow(ctx: Context, _: object) -> None:
        seen.append(await ctx.step("make", returning(annotations[0], {"a": [1, 2]})))
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        recorded = await namespace.dump()
        annotations[0] = dict[str, list[str]]
        await process.restart()
        with pytest.raises(StoredValueError, match="recorded result of step 'make'") as caught:
            await process.stop(workflow)
        assert (caught.value.path, caught.value.expected, caught.value.found) == ("result['a'][0]", "str", "int")
        await process.restart()
        assert await namespace.dump() == recorded
        annotations[0] = dict[str, list[int]]
        await process.send("go")
        await process.finish(workflow)
    assert seen == [{"a": [1, 2]}] * 2
    assert calls == ["step"]


async def test_a_field_can_be_removed_from_a_class_and_one_with_a_default_added(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: what was recorded is read by the class as it is now."""

    @dataclass
    class Before:
        kept: int
        removed: int

    @dataclass
    class After:
        kept: int
        added: str = "default"

    annotations: list[Any] = [Before]
    seen: list[Any] = []

    async def workflow(ctx: Context, _: object) -> None:
        seen.append(await ctx.step("make", returning(annotations[0], Before(1, 2))))
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        annotations[0] = After
        await process.restart()
        await process.send("go")
        await process.finish(workflow)
    assert seen == [Before(1, 2), After(1)]


class Small(pydantic.BaseModel):
    x: int


class Large(pydantic.BaseModel):
    x: int
    y: int = 0


class Bare(TypedDict):
    sku: str


CHOICES: dict[str, tuple[Any, Any]] = {
    "dict that looks like a class": (Item | dict[str, Any], {"sku": "a", "price": Decimal(1), "more": 1}),
    "typed dict that looks like a class": (Item | Bare, {"sku": "a", "price": Decimal(1), "more": 1}),
    "pydantic with more fields": (Small | Large, Large(x=1, y=2)),
    "pydantic with fewer fields": (Small | Large, Small(x=1)),
    "enum before text": (str | Color, Color.RED),
    "int before float": (float | int, 1),
    "list of one of two": (list[int] | list[str], ["a"]),
}


@pytest.mark.parametrize("kind", CHOICES)
async def test_a_member_of_a_union_is_the_same_one_on_replay(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, kind: str
) -> None:
    """S8: what a lenient reader would take for another member is read by the one that it was checked against."""
    annotation, value = CHOICES[kind]
    seen: list[Any] = []

    async def workflow(ctx: Context, _: object) -> None:
        seen.append(await ctx.step("make", returning(annotation, value)))
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        await process.finish(workflow)
    assert [form(got) for got in seen] == [form(value)] * 2


def test_unions_that_python_holds_equal_are_read_alike() -> None:
    """S8: whichever of them was met first, in this process or another."""
    one, other = returns(returning(str | Color, "")), returns(returning(Color | str, ""))
    assert one is other, "they share what was found"
    assert one is not None
    assert one.round_trip("red", bytes_max=100, what="it", root="it")[1] is Color.RED


def test_what_is_remembered_is_bounded() -> None:
    """S11: workflows that define their classes anew on every run do not fill the memory."""
    for number in range(1100):
        local = enum.Enum(f"Local{number}", ["A"])
        converter = converter_of(local)
        assert converter.round_trip(local["A"], bytes_max=100, what="it", root="it")[1] is local["A"]
    assert len(typed._converters) <= 1024
    assert converter_of(Order).decode(encode_value(ORDER_PLAIN), what="it", root="it") == ORDER


@pytest.mark.parametrize("annotation", [list["Unknown"], dict[str, "Unknown"]])  # noqa: F821 - the point of the test
def test_a_quoted_name_that_cannot_be_found_says_nothing(annotation: Any) -> None:
    """S8: also within a type."""
    assert returns(returning(annotation, None)) is None


def test_a_field_whose_type_cannot_be_found_is_refused() -> None:
    """S9: before anything runs, naming what cannot be found."""

    @dataclass
    class Broken:
        x: "Missing"  # type: ignore[name-defined]  # noqa: F821, UP037

    with pytest.raises(InvalidArgumentError, match=r"list\[Broken\]: name 'Missing' is not defined"):
        returns(returning(list[Broken], None))


def test_a_class_that_only_says_self_is_left_alone() -> None:
    """S8: `Self` and protocols say nothing that a value could be made by."""

    class Own:
        def twin(self) -> Self:
            return self

        def sized(self) -> Shaped:
            raise NotImplementedError

    assert returns(Own().twin) is None
    assert returns(Own().sized) is None


def test_an_object_in_plain_containers_is_refused_as_without_annotation() -> None:
    """S9: it would come back as a dict."""
    for annotation in (list[Any], dict[str, Any] | None, Sequence[Any], list[T]):
        converter = converter_of(annotation)
        value = {"a": ITEM} if "dict" in str(annotation) else [ITEM]
        with pytest.raises(EncodeError, match="Item"):
            converter.round_trip(value, bytes_max=1000, what="it", root="it")
