"""Keys of the supervisor's own namespace: each is parsed to what it was built from, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.storage import layout
from perdure.storage import own_layout as own
from perdure.storage.keys import KeyDecodeError, pack

NAMES = st.text(min_size=1, max_size=20)
NUMBERS = st.integers(0, 2**53)


@given(name=NAMES, number=NUMBERS, other=NAMES)
def test_every_key_says_what_it_is_and_lies_under_its_prefix(name: str, number: int, other: str) -> None:
    for build, prefix in (
        (own.schedule_definition_key, own.SCHEDULE_DEFINITION_PREFIX),
        (own.schedule_input_key, own.SCHEDULE_INPUT_PREFIX),
        (own.schedule_cursor_key, own.SCHEDULE_CURSOR_PREFIX),
    ):
        key = build(name)
        assert own.parse_schedule_key(key) == name
        assert key.startswith(prefix)
        assert key.startswith(own.SCHEDULES_PREFIX)
        for parse in (own.parse_schedule_run_key, own.parse_rate_key):
            with pytest.raises(KeyDecodeError):
                parse(key)
    run = own.schedule_run_key(name, number)
    assert own.parse_schedule_run_key(run) == (name, number)
    assert run.startswith(own.SCHEDULE_RUN_PREFIX)
    assert run.startswith(own.schedule_runs_prefix(other)) == (name == other)
    rate = own.rate_key(name, number)
    assert own.parse_rate_key(rate) == (name, number)
    assert rate.startswith(own.RATE_PREFIX)
    assert rate.startswith(own.rates_prefix(other)) == (name == other)


@given(name=NAMES, numbers=st.lists(NUMBERS, min_size=2))
def test_runs_and_beginnings_are_in_the_order_of_their_numbers(name: str, numbers: list[int]) -> None:
    for build in (own.schedule_run_key, own.rate_key):
        assert sorted(build(name, number) for number in numbers) == [build(name, number) for number in sorted(numbers)]


@pytest.mark.parametrize(
    "key", [b"", b"\xff", pack((64,)), pack((64, 1)), pack((64, 5, "s")), pack((64, 1, "s", 1)), pack((64, 4, "s")), pack((65,)),
            pack((65, 1)), pack((65, "t")), pack((66, "t", 1)), layout.STATE_KEY],
)  # fmt: skip
def test_other_keys_are_refused(key: bytes) -> None:
    for parse in (own.parse_schedule_key, own.parse_schedule_run_key, own.parse_rate_key):
        with pytest.raises(KeyDecodeError):
            parse(key)


def test_its_prefixes_are_above_those_of_workflows() -> None:
    ours = [value for name, value in vars(own).items() if name.endswith("_PREFIX")]
    theirs = [value for name, value in vars(layout).items() if name.endswith("_PREFIX")]
    assert min(ours) > max(theirs)
