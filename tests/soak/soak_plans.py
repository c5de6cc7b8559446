"""What the soak does with each workflow, from a seed alone: the same seed gives the same plan in every process.

Nothing here knows the time, the store or the supervisor.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ASKER",
    "NOTES",
    "SENDERS",
    "Plan",
    "child_id",
    "message_id",
    "plan_of",
    "sink_id",
    "sinks_of",
    "workflow_id",
]

SENDERS = ("a", "b")

ASKER = "q"
"""The client that sends requests, and waits for the reply to each before the next."""

NOTES = 2
"""How many messages a workflow that sends to a sink sends it."""

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of one workflow. Durations in seconds.

    Attributes:
        number: Which workflow.
        delay_s: How long after the start of a process its clients begin.
        messages: How many messages each sender sends.
        asks: How many requests the asker sends.
        naps: After how many messages it sleeps, and for how long; an hour is ended by a wake.
        pause_s: How long a sender waits before each message.
        sink: The workflow that it sends to, if it does.
        has_child: Whether it calls another workflow.
        is_left_alone: Whether nobody looks at it once all that was to be asked of it was; the catalog alone tells that it has
            ended. Looking at a workflow would bring back one whose wake got lost.
        start_s: How long after it was asked for it starts.
        deadline_s: How long after it was asked for it fails, unless it has ended; `None` for never.
        acts: What a third client does meanwhile, in order: `wake`, `evict`, `look`, `pause`, `recover` or `cancel`.
    """

    number: int
    delay_s: float
    messages: int
    asks: int
    naps: dict[int, float]
    pause_s: float
    sink: str | None
    has_child: bool
    is_left_alone: bool
    start_s: float
    deadline_s: float | None
    acts: tuple[str, ...]

    @property
    def reads(self) -> int:
        """How many messages the workflow reads."""
        return self.messages * len(SENDERS) + self.asks

    @property
    def letters(self) -> dict[str, tuple[str, int]]:
        """All messages and requests that are sent to it: sender and number, by id."""
        sent = [(sender, index) for sender in SENDERS for index in range(self.messages)]
        sent += [(ASKER, index) for index in range(self.asks)]
        return {message_id(self.number, sender, index): (sender, index) for sender, index in sent}

    @property
    def is_cancelled(self) -> bool:
        """Whether it is to be cancelled."""
        return "cancel" in self.acts

    @property
    def needs_wakes(self) -> bool:
        """Whether it has to be woken by hand."""
        return needs_wakes(self.naps, self.acts)

    def input(self) -> dict[str, Any]:
        """What the workflow is given."""
        return {
            "number": self.number,
            "reads": self.reads,
            "naps": [list(nap) for nap in self.naps.items()],
            "sink": self.sink,
            "has_child": self.has_child,
        }


def needs_wakes(naps: dict[int, float], acts: Sequence[str]) -> bool:
    """Whether a workflow sleeps for longer than anybody waits; or is evicted, and stays away until it is asked for."""
    return HOUR_S in naps.values() or "evict" in acts


def workflow_id(number: int) -> str:
    """The id of a workflow of the soak."""
    return f"soak-{number}"


def child_id(number: int) -> str:
    """The id of the workflow that one calls, if it does."""
    return f"{workflow_id(number)}.child"


def sink_id(number: int) -> str:
    """The id of a sink: a workflow to which others send."""
    return f"sink-{number}"


def sinks_of(workflows: int) -> int:
    """How many sinks there are."""
    return 1 + workflows // 25


def message_id(number: int, sender: str, index: int) -> str:
    """The id of a message."""
    return f"{workflow_id(number)}/{sender}/{index}"


def plan_of(seed: int, number: int, workflows: int) -> Plan:
    """The plan of one of so many workflows."""
    chance = random.Random(f"{seed}/{number}")
    messages, asks = chance.randint(1, 3), chance.choice((0, 0, 1, 2))
    naps = {
        index: chance.choice((0.0, 0.01, 0.05, HOUR_S if chance.random() < 0.5 else 0.3))
        for index in range(messages * len(SENDERS) + asks)
        if chance.random() < 0.3
    }
    acts = [chance.choice(("wake", "evict", "look", "pause", "recover")) for _ in range(chance.randint(0, 4))]
    if chance.random() < 0.12:
        acts.append("cancel")
    start_s = chance.choice((0.0, 0.0, 0.0, 0.1, 0.5))
    deadline_s = start_s + chance.uniform(0.1, 0.02 * workflows) if chance.random() < 0.08 else None
    if deadline_s is not None:
        acts = [act for act in acts if act != "recover"]  # it would have no time left
    return Plan(
        number=number,
        delay_s=chance.uniform(0.0, 0.002 * workflows),
        messages=messages,
        asks=asks,
        naps=naps,
        pause_s=chance.choice((0.0, 0.01, 0.1)),
        sink=sink_id(number % sinks_of(workflows)) if chance.random() < 0.5 else None,
        has_child=chance.random() < 0.4,
        is_left_alone=not needs_wakes(naps, acts) and chance.random() < 0.8,
        start_s=start_s,
        deadline_s=deadline_s,
        acts=tuple(acts),
    )
