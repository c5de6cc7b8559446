"""When a workflow wants to be activated: one table, for the supervisor and for a rebuild."""

from __future__ import annotations

import pytest

from perdure.storage.wake import TERMINAL_STATES, wake_of


@pytest.mark.parametrize(
    ("state", "alarm_ms", "wants_mail", "wake_ms"),
    [
        ("pending", None, False, 0),
        ("pending", None, True, 0),
        ("pending", 50, False, 50),
        ("pending", 50, True, 50),
        ("running", None, False, 0),
        ("running", 50, False, 0),
        ("sleeping", None, False, None),
        ("sleeping", 50, False, 50),
        ("sleeping", 50, True, 0),
        ("sleeping", None, True, 0),
        ("rolling_back", None, False, 0),
        ("rolling_back", None, True, 0),
        ("rolling_back", 50, True, 50),
        ("a state of tomorrow", 50, False, 0),
    ],
)
def test_a_workflow_that_goes_on_is_woken_when_it_has_something_to_do(
    state: str, alarm_ms: int | None, wants_mail: bool, wake_ms: int | None
) -> None:
    """S50: a pending one waits for its start and for no message; what is not understood is woken at once."""
    assert wake_of(state, alarm_ms, wants_mail=wants_mail) == wake_ms
    assert wake_of(state, alarm_ms, wants_mail=wants_mail, has_duties=True) == 0


@pytest.mark.parametrize("state", sorted(TERMINAL_STATES))
def test_one_that_has_ended_is_woken_for_its_duties_only(state: str) -> None:
    """S34: nothing brings it back, unless it owes something to others."""
    assert wake_of(state, 50, wants_mail=True) is None
    assert wake_of(state, 50, wants_mail=True, has_duties=True) == 0
