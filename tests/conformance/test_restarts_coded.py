"""The plays of the other modules once more, on a namespace whose user data a codec wraps (see `support/restarts.py`).

1. One mode and one driver are enough: the codec sits between the engine and the driver, and knows neither.
2. A play compares what it finds after each death with what it found without one, all through the codec; so a value that came
   back as another would show.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import DriverKind, Namespace
from value_codecs import SealedCodec

from perdure.workflow import RunMode

PLAYS = {
    "test_restarts_history": [
        "test_what_is_finished_is_passed_over_as_a_unit_wherever_it_is",
        "test_a_failure_that_try_step_handed_back_is_the_same_value_on_replay",
        "test_empty_values_are_values",
        "test_every_run_sees_equal_values_of_equal_types_whatever_the_code_does_to_them",
        "test_errors_of_every_shape_are_raised_alike_and_readable_after_every_restart",
        "test_pruning_commits_with_the_state_it_belongs_to_and_keeps_as_many_iterations_as_asked",
        "test_a_replay_from_a_step_keeps_what_came_before_it_and_loses_no_message",
    ],
    "test_restarts_waiting": [
        "test_retries_go_on_where_they_were_and_an_exhausted_step_recovers_with_a_fresh_count",
        "test_a_storage_error_is_no_failure_of_a_step",
        "test_messages_are_taken_in_order_by_name_and_count_and_none_is_eaten_by_a_timeout",
        "test_a_message_is_neither_lost_nor_handled_twice_between_its_sending_and_its_handling",
        "test_a_completable_message_is_handed_out_until_it_is_complete",
        "test_a_race_does_not_wait_for_its_losers_and_their_effects_do_not_recur",
        "test_settled_branches_are_kept_and_their_errors_told_apart_alike_on_every_run",
    ],
    "test_restarts_endings": [
        "test_rollback_undoes_every_completed_step_in_reverse_and_goes_on_where_it_was",
        "test_a_failing_handler_is_retried_and_then_both_errors_are_kept",
        "test_recover_resets_what_failed_and_what_was_undone_and_nothing_else",
    ],
}


@pytest.fixture(params=["memory"])
def driver_kind(request: pytest.FixtureRequest) -> DriverKind:
    return request.param


@pytest.fixture(params=["yield"])
def mode(request: pytest.FixtureRequest) -> RunMode:
    return request.param


@pytest.fixture
def make_quick_namespace(driver_kind: DriverKind, tmp_path: Path) -> Callable[[], Namespace]:
    return lambda: Namespace(driver_kind, tmp_path, codec=SealedCodec())


def plays() -> Iterator[tuple[str, Any]]:
    for module_name, names in PLAYS.items():
        spec = importlib.util.spec_from_file_location(module_name, Path(__file__).with_name(f"{module_name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name in names:
            yield name, getattr(module, name)


globals().update(plays())
