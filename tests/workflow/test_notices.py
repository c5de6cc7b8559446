"""What a workflow is told of those that it calls."""

from __future__ import annotations

from trio.testing import MockClock

from perdure.storage import MemoryDriver, layout
from perdure.workflow import TrioClock, WorkflowState
from perdure.workflow.activation import Activation
from perdure.workflow.calls import ChildOutcome, OpenCall
from perdure.workflow.notices import receive


async def test_a_run_that_has_not_come_to_its_call_yet_is_told_in_a_state_that_brings_it_back(
    autojump_clock: MockClock,
) -> None:
    """S43, S45: killed right after it was told, while it replayed: durably asleep, nothing would have woken it again."""
    driver = MemoryDriver()
    activation = await Activation.load("w", driver, clock=TrioClock())
    activation.history.state = WorkflowState.SLEEPING
    activation.history.calls.open(OpenCall("entry", "child", "cancel", True, False, False))
    activation.is_running = True
    assert not activation.awaits(("child", "child"))
    await receive(activation, "child", ChildOutcome("completed", None, None))
    assert layout.outcome_key("entry") in driver.data
    assert driver.data[layout.STATE_KEY] == b"running"
