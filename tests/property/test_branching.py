"""Random trees of joins, races, loops and blocks, restarted and crashed anywhere: they end as an undisturbed run does.

A program is data, as in test_engine.py; the difference is that parts of it run beside each other (support/programs.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import DriverKind
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from programs import Block, Disturbance, Join, Loop, Program, Race, Read, Sleep, Step, check_disturbed

from perdure.workflow import RunMode

steps = st.builds(
    Step, st.sampled_from([0, 0, 3]), st.sampled_from(["works", "works", "fails once", "fails", "is tried"])
)
leaves = steps | st.builds(Sleep, st.integers(0, 5)) | st.builds(Read)


def composites(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Everything that has parts, over such parts."""
    body = st.lists(part, max_size=2).map(tuple)
    branches = st.lists(body, min_size=1, max_size=3).map(tuple)
    return (
        st.builds(Join, branches)
        | st.builds(Race, branches, st.booleans())
        | st.builds(Loop, body, st.integers(1, 3), st.integers(0, 1))
        | st.builds(Block, body)
    )


inner = composites(leaves)
programs = st.lists(leaves | composites(leaves | inner | composites(leaves | inner)), min_size=1, max_size=3).map(tuple)


disturbances = st.builds(
    Disturbance,
    st.booleans(),
    st.lists(st.booleans(), max_size=12).map(tuple),
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["before", "after"])), max_size=4).map(tuple),
)


@pytest.mark.parametrize("mode", ["yield", "live"])
@pytest.mark.parametrize("driver_kind", ["memory", "sqlite"])
@given(program=programs, disturbance=disturbances, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_disturbed_tree_of_branches_ends_as_an_undisturbed_one(
    driver_kind: DriverKind, mode: RunMode, tmp_path: Path, program: Program, disturbance: Disturbance, seed: int
) -> None:
    """S1, S29, S30, S39: the same output, the same history, no acknowledged effect again, in both modes."""
    check_disturbed(program, disturbance, seed, mode, driver_kind, tmp_path)
    event(f"{len(disturbance.crashes)} crashes")
