"""What is kept of an exception: bounded, decodable, never a failure of its own."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from harness import Namespace, host
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from perdure.storage import decode_value, encode_value
from perdure.workflow import (
    Context,
    CriticalError,
    ErrorInfo,
    RollbackError,
    RunMode,
    StepCriticalError,
    StepError,
    WorkflowFailedError,
    WorkflowState,
)
from perdure.workflow.failures import (
    TEXT_BYTES_MAX,
    causes_of,
    cut_text,
    describe,
    failure_kind,
    info_from_map,
    info_from_text,
    info_to_map,
    kind_from_text,
    sole_exception,
    step_error,
)

MARK = "… [cut]"


def step_failure(entry_id: str) -> StepError:
    return step_error("exhausted", "charge", 4, ErrorInfo("OSError", "no route"), entry_id)


class TestCutText:
    @pytest.mark.parametrize("character", ["a", "é", "€", "😀", "ש"])
    def test_text_of_exactly_the_limit_stays_and_one_byte_more_is_cut(self, character: str) -> None:
        """S10: the message is kept up to the limit and cut between characters."""
        width = len(character.encode())
        fitting = character * (64 // width)
        limit = len(fitting.encode())
        assert cut_text(fitting, limit) == fitting
        cut = cut_text(fitting + "x", limit)
        assert cut.endswith(MARK)
        assert len(cut.encode()) <= limit
        kept = cut.removesuffix(MARK)
        assert fitting.startswith(kept)
        assert len(kept.encode()) > limit - len(MARK.encode()) - width, "no more is lost than one character"

    def test_a_megabyte_of_non_ascii_text_is_kept_to_64_kib(self) -> None:
        """S10: a non-ASCII message of 1 MB is kept to 64 KiB, cut between characters, marked."""
        cut = cut_text("ü€😀" * 120_000)
        assert TEXT_BYTES_MAX - 4 <= len(cut.encode()) <= TEXT_BYTES_MAX
        assert cut.endswith(MARK)

    def test_lone_surrogates_become_storable(self) -> None:
        assert cut_text("a\udc80b") == "a?b"

    @given(st.text(st.characters(codec=None)), st.integers(min_value=9, max_value=200))
    def test_whatever_the_text_the_result_fits_and_encodes(self, text: str, limit: int) -> None:
        assert len(cut_text(text, limit).encode()) <= limit


class TestKinds:
    def test_an_ordinary_error_may_be_retried(self) -> None:
        assert failure_kind(ValueError("x")) is None

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (CriticalError("c"), "critical"),
            (RollbackError("r"), "rollback"),
            (ExceptionGroup("g", [ValueError("x"), CriticalError("c")]), "critical"),
            (ExceptionGroup("g", [ExceptionGroup("h", [CriticalError("c")]), ValueError("x")]), "critical"),
            (ExceptionGroup("g", [CriticalError("c"), RollbackError("r")]), "rollback"),
            (ExceptionGroup("g", [ValueError("x"), KeyError("y")]), None),
        ],
    )
    def test_a_group_is_critical_if_any_leaf_is(self, error: Exception, kind: str | None) -> None:
        assert failure_kind(error) == kind

    def test_a_subclass_of_critical_error_is_critical(self) -> None:
        class CardStolenError(CriticalError):
            pass

        assert failure_kind(CardStolenError("x")) == "critical"

    def test_a_group_of_one_counts_as_that_one(self) -> None:
        leaf = ValueError("deep")
        assert sole_exception(ExceptionGroup("g", [ExceptionGroup("h", [leaf])])) is leaf
        info = describe(ExceptionGroup("g", [leaf]))
        assert (info.name, info.message) == ("ValueError", "deep")

    def test_a_group_of_several_is_reported_as_the_group(self) -> None:
        group = ExceptionGroup("both", [ValueError("x"), KeyError("y")])
        assert sole_exception(group) is group
        info = describe(group)
        assert info.name == "ExceptionGroup"
        assert info.message == "both (2 sub-exceptions)"
        assert info.stack is not None
        assert "ValueError: x" in info.stack

    @pytest.mark.parametrize("grouped", [False, True])
    def test_a_critical_step_failure_is_reported_under_its_own_name(self, grouped: bool) -> None:
        failure: Exception = step_error("critical", "charge", 1, ErrorInfo("CardStolenError", "do not retry"), "e1")
        if grouped:
            failure = ExceptionGroup("out of a nursery", [failure])
        info = describe(failure)
        assert (info.name, info.message) == ("CardStolenError", "do not retry")

    @pytest.mark.parametrize(
        ("text", "kind", "name", "message"),
        [
            ("CriticalError: no", "critical", "CriticalError", "no"),
            ("RollbackError: back", "rollback", "RollbackError", "back"),
            ("StepTimeoutError: slow", "timeout", "StepTimeoutError", "slow"),
            ("TypeError: a: b", "exhausted", "TypeError", "a: b"),
            ("just words: and more", "exhausted", "Error", "just words: and more"),
            ("plain", "exhausted", "Error", "plain"),
            ("", "exhausted", "Error", ""),
        ],
    )
    def test_the_reference_engines_text_tells_kind_name_and_message(
        self, text: str, kind: str, name: str, message: str
    ) -> None:
        assert kind_from_text(text) == kind
        assert info_from_text(text) == ErrorInfo(name, message)


class TestDescribe:
    def test_attributes_of_plain_type_are_kept_and_others_left_out(self) -> None:
        """S10: an exception with attributes keeps those of plain type as metadata."""

        class CardError(Exception):
            def __init__(self, code: int, reason: str) -> None:
                super().__init__(f"{code}: {reason}")
                self.code = code
                self.reason = reason
                self.declined = True
                self.ratio = 0.5
                self.nothing = None
                self.huge = 1 << 64
                self.items = [1]
                self.stack = "not this"

        info = describe(CardError(7, "stolen"))
        assert info.name == "CardError"
        assert info.message == "7: stolen"
        assert dict(info.metadata) == {"code": 7, "reason": "stolen", "declined": True, "ratio": 0.5, "nothing": None}

    def test_many_and_long_attributes_are_bounded(self) -> None:
        error = ValueError("x")
        for number in range(500):
            setattr(error, f"a{number}" + "k" * 1000, "v" * 100_000)
        info = describe(error)
        assert len(info.metadata) == 64
        assert all(len(key.encode()) <= 512 for key in info.metadata)
        assert all(isinstance(value, str) and len(value.encode()) <= 4096 for value in info.metadata.values())
        assert len(encode_value(info_to_map(info))) < 976 * 1024

    def test_a_deep_stack_is_bounded(self) -> None:
        def dive(depth: int) -> None:
            if depth == 0:
                raise ValueError("bottom")
            dive(depth - 1)

        with pytest.raises(ValueError, match="bottom") as caught:
            dive(500)
        info = describe(caught.value)
        assert info.stack is not None
        assert len(info.stack.encode()) <= TEXT_BYTES_MAX
        assert "bottom" in info.stack

    def test_a_chain_is_in_the_stack(self) -> None:
        """S10: an exception from a chain."""
        try:
            try:
                raise KeyError("first")
            except KeyError as first:
                raise ValueError("second") from first
        except ValueError as second:
            info = describe(second)
        assert info.stack is not None
        assert "KeyError: 'first'" in info.stack
        assert "ValueError: second" in info.stack

    def test_an_exception_that_cannot_even_be_printed_is_described_all_the_same(self) -> None:
        class HostileError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no")

            __repr__ = __str__

        info = describe(HostileError())
        assert info.name == "HostileError"
        assert "RuntimeError" in info.message

    def test_attributes_with_odd_keys_do_no_harm(self) -> None:
        error = ValueError("x")
        error.__dict__.update({7: "seven"})  # type: ignore[dict-item]
        error.__dict__["fine"] = 1
        assert dict(describe(error).metadata) == {"fine": 1}

    def test_what_is_stored_comes_back_the_same(self) -> None:
        error = ValueError("ü")
        error.code = 3  # type: ignore[attr-defined]
        info = describe(error)
        assert info_from_map(decode_value(encode_value(info_to_map(info)))) == info

    @pytest.mark.parametrize(
        ("stored", "info"),
        [
            ("text", ErrorInfo("Error", "text")),
            ({}, ErrorInfo("Error", "")),
            ({"name": "E", "message": "m", "metadata": 5}, ErrorInfo("E", "m")),
        ],
    )
    def test_maps_of_other_writers_are_tolerated(self, stored: Any, info: ErrorInfo) -> None:
        assert info_from_map(stored) == info


class TestCauses:
    def test_causes_are_found_through_cause_context_and_groups(self) -> None:
        direct = step_failure("e1")
        raised_from = ValueError("from")
        raised_from.__cause__ = step_failure("e2")
        during = ValueError("during")
        during.__context__ = step_failure("e3")
        group = ExceptionGroup("g", [direct, ExceptionGroup("h", [raised_from]), during])
        assert sorted(causes_of(group)) == ["e1", "e2", "e3"]

    def test_one_cause_met_twice_counts_once(self) -> None:
        failure = step_failure("e1")
        assert causes_of(ExceptionGroup("g", [failure, failure])) == ["e1"]

    def test_what_is_behind_a_steps_failure_is_the_users(self) -> None:
        failure = step_failure("outer")
        failure.__cause__ = step_failure("inner")
        assert causes_of(failure) == ["outer"]

    def test_a_circle_of_causes_ends(self) -> None:
        first, second = ValueError("1"), ValueError("2")
        first.__cause__, second.__cause__ = second, first
        second.__context__ = step_failure("e1")
        assert causes_of(first) == ["e1"]

    def test_an_error_of_the_workflows_own_has_none(self) -> None:
        assert causes_of(ValueError("x")) == []


async def test_a_critical_failure_out_of_the_users_nursery_ends_the_workflow_under_its_own_name(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S10: the failure of a step that comes out of a user's nursery as a group of one is stored as that one."""

    class CardStolenError(CriticalError):
        pass

    async def charge() -> None:
        raise CardStolenError("do not retry")

    async def order(ctx: Context, _: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ctx.step, "charge", charge)

    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError) as caught:
            await process.stop(order)
        assert (caught.value.name, caught.value.message) == ("CardStolenError", "do not retry")
        await process.restart()
        with pytest.raises(WorkflowFailedError) as again:
            await process.stop(order)
        assert again.value.error == caught.value.error
    snapshot = await namespace.snapshot()
    await namespace.close()
    assert snapshot.state is WorkflowState.FAILED
    assert snapshot.error is not None
    assert snapshot.error.name == "CardStolenError"


async def test_a_group_out_of_a_step_is_retried_unless_a_leaf_is_critical(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S10, S17: groups out of a step: an ordinary one is retried, one with a critical leaf is not."""
    attempts: list[str] = []

    async def ordinary() -> str:
        attempts.append("ordinary")
        if attempts.count("ordinary") < 3:
            raise ExceptionGroup("g", [ValueError("x"), KeyError("y")])
        return "worked"

    async def critical() -> None:
        attempts.append("critical")
        raise ExceptionGroup("g", [ValueError("x"), CriticalError("y")])

    async def order(ctx: Context, _: Any) -> str:
        value = await ctx.step("ordinary", ordinary)
        try:
            await ctx.step("critical", critical)
        except StepCriticalError as failure:
            return f"{value}, {failure.error.name}, {failure.kind}"
        return "not reached"

    async with host(namespace, mode) as process:
        output = await process.finish(order)
    assert output == "worked, ExceptionGroup, critical"
    assert attempts == ["ordinary"] * 3 + ["critical"]
