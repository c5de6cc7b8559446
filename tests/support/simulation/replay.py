"""A replay aside: a history, as a dead process left it, is run again up to its end, and nothing comes of it.

It writes to a copy, and ends at its first write: what the code is given up to there was recorded. A history that does not fit the
code raises; what the code is given is compared by the world.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.storage import MemoryDriver, layout
from perdure.storage.values import decode_value
from perdure.testing import CrashPoint, FaultyDriver, SimulatedCrash, run_virtual
from perdure.workflow import HistoryDivergedError, HostRequiredError, run_workflow
from perdure.workflow.definition import definition_of
from simulation.interpreter import WORKFLOWS
from simulation.world import World

__all__ = ["replay_aside"]

_FUNCTIONS: dict[str, Any] = {definition.name: definition for definition in map(definition_of, WORKFLOWS)}


def replay_aside(world: World, workflow_id: str, pairs: Mapping[bytes, bytes]) -> None:
    """Replay one workflow's history; blames who does not fit it."""
    driver = FaultyDriver(MemoryDriver(dict(pairs)), crash_at=CrashPoint(0, "before"))
    function = _FUNCTIONS[pairs[layout.WORKFLOW_TYPE_KEY].decode()]
    input = decode_value(pairs[layout.INPUT_KEY]) if layout.INPUT_KEY in pairs else None
    world.is_offline = True
    try:
        run_virtual(run_workflow, workflow_id, function, input, driver)
    except HistoryDivergedError as error:
        world.is_offline = False
        world.blame("replay identical", f"the history of {workflow_id} does not fit: {error}")
    except (SimulatedCrash, HostRequiredError):
        pass
    except BaseExceptionGroup as group:  # branches died at once
        if group.split(SimulatedCrash)[1] is not None:
            raise
    finally:
        world.is_offline = False
