"""Definitions: a function and the name by which it is found again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from perdure.storage import PerdureError
from perdure.workflow import Context, InvalidArgumentError, Workflow, definition_of, workflow


async def order(ctx: Context, order_id: str) -> str:
    return order_id


class CallableWorkflow:
    """An object whose call is a coroutine function."""

    async def __call__(self, ctx: Context, given: str) -> str:
        return given


def test_a_function_is_known_by_its_own_name() -> None:
    assert workflow(order) == Workflow(order, "order")
    assert definition_of(order) == Workflow(order, "order")


def test_a_given_name_counts() -> None:
    assert workflow(name="order-v1")(order).name == "order-v1"


def test_the_decorator_with_empty_parentheses_takes_the_functions_name() -> None:
    assert workflow()(order) == Workflow(order, "order")


def test_a_definition_is_its_own_definition() -> None:
    named = workflow(name="order-v1")(order)
    assert definition_of(named) is named


async def test_calling_a_definition_calls_the_function() -> None:
    named = workflow(name="order-v1")(order)
    ctx: Any = object()
    assert await named(ctx, "order-7") == "order-7"


def test_a_callable_object_and_a_partial_do_with_a_name() -> None:
    assert workflow(name="object")(CallableWorkflow()).name == "object"
    assert workflow(name="partial")(partial(order)).name == "partial"


@pytest.mark.parametrize("name", ["Bestellung-ü", "😀", "a/b", "x" * 512])
def test_any_text_of_up_to_512_bytes_is_a_name(name: str) -> None:
    assert workflow(name=name)(order).name == name


@pytest.mark.parametrize("name", ["", "x" * 513, "ü" * 257, "lone \ud800 surrogate", 5, b"order"])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"write for example|shorten it|decode the bytes"):
        workflow(name=name)(order)


def plain(ctx: Context, given: str) -> str:
    return given


async def takes_one(ctx: Context) -> None:
    pass


async def takes_three(ctx: Context, given: str, more: str) -> None:
    pass


@pytest.mark.parametrize(
    "wrong", [None, 5, "order", plain, takes_one, takes_three, lambda ctx, given: order(ctx, given), object()]
)
def test_what_is_no_coroutine_function_of_two_arguments_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"async def order\(ctx, input\)") as caught:
        definition_of(wrong)
    assert isinstance(caught.value, PerdureError)


def test_a_function_that_was_called_already_is_refused_without_a_warning() -> None:
    """An un-awaited coroutine would also warn; warnings are errors here."""
    ctx: Any = object()
    with pytest.raises(InvalidArgumentError, match="called already"):
        definition_of(order(ctx, "x"))


def test_an_anonymous_workflow_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r'write for example @workflow\(name="order"\)'):
        definition_of(partial(order))
    with pytest.raises(InvalidArgumentError, match=r'write for example @workflow\(name="order"\)'):
        definition_of(CallableWorkflow())


def test_a_lambda_that_is_a_workflow_needs_a_name() -> None:
    inner = CallableWorkflow()
    inner.__name__ = "<lambda>"  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgumentError, match=r'write for example @workflow\(name="order"\)'):
        definition_of(inner)


def test_a_definition_made_by_hand_is_checked_too() -> None:
    wrong: Any = 5
    with pytest.raises(InvalidArgumentError):
        Workflow(wrong, "order")
    with pytest.raises(InvalidArgumentError):
        Workflow(order, "")
