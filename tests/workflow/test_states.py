"""The seven states: what follows what, and that nothing else does."""

from __future__ import annotations

from itertools import product

import pytest

from perdure.storage import PerdureError
from perdure.workflow import InvalidTransitionError, WorkflowState
from perdure.workflow.states import TERMINAL_STATES, WorkflowEvent, next_state

FOLLOWING = {
    ("pending", "run"): "running",
    ("pending", "park"): "sleeping",
    ("pending", "complete"): "completed",
    ("pending", "fail"): "failed",
    ("pending", "roll_back"): "rolling_back",
    ("pending", "cancel"): "cancelled",
    ("running", "run"): "running",
    ("running", "park"): "sleeping",
    ("running", "complete"): "completed",
    ("running", "fail"): "failed",
    ("running", "roll_back"): "rolling_back",
    ("running", "cancel"): "cancelled",
    ("sleeping", "run"): "running",
    ("sleeping", "park"): "sleeping",
    ("sleeping", "complete"): "completed",
    ("sleeping", "fail"): "failed",
    ("sleeping", "roll_back"): "rolling_back",
    ("sleeping", "cancel"): "cancelled",
    ("rolling_back", "run"): "rolling_back",
    ("rolling_back", "park"): "rolling_back",
    ("rolling_back", "roll_back"): "rolling_back",
    ("rolling_back", "fail"): "failed",
    ("rolling_back", "cancel"): "cancelled",
    ("failed", "recover"): "pending",
    **{(state.value, "rewind"): "pending" for state in WorkflowState},
}
PAIRS = list(product(WorkflowState, WorkflowEvent))


def test_every_pair_is_either_in_the_table_or_an_error_that_names_both() -> None:
    refused = 0
    for state, event in PAIRS:
        expected = FOLLOWING.get((state.value, event.value))
        if expected is not None:
            assert next_state(state, event) is WorkflowState(expected)
            continue
        with pytest.raises(InvalidTransitionError) as caught:
            next_state(state, event)
        refused += 1
        assert caught.value.state is state
        assert caught.value.event is event
        assert state.value in str(caught.value)
        assert event.value in str(caught.value)
        assert isinstance(caught.value, PerdureError)
    assert refused == 7 * 8 - len(FOLLOWING)


@pytest.mark.parametrize("event", WorkflowEvent)
def test_nothing_leads_out_of_a_terminal_state_but_recover_and_rewind(event: WorkflowEvent) -> None:
    for state in TERMINAL_STATES:
        if (state, event) == (WorkflowState.FAILED, WorkflowEvent.RECOVER) or event is WorkflowEvent.REWIND:
            continue
        with pytest.raises(InvalidTransitionError):
            next_state(state, event)


def test_the_stored_texts_are_the_reference_engines_seven() -> None:
    assert {state.value for state in WorkflowState} == {
        "pending",
        "running",
        "sleeping",
        "rolling_back",
        "failed",
        "completed",
        "cancelled",
    }


def test_exactly_three_states_are_terminal() -> None:
    assert {state.value for state in WorkflowState if state.is_terminal} == {"failed", "completed", "cancelled"}


def test_every_state_that_is_not_terminal_can_be_cancelled() -> None:
    for state in WorkflowState:
        if not state.is_terminal:
            assert next_state(state, WorkflowEvent.CANCEL) is WorkflowState.CANCELLED
