"""A workflow that both engines run by turns, on the same bytes, ends as if one had run it alone.

Which engine makes which run is a word: `o` for ours, `t` for theirs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from dumps import contents_of, meaning_of, same_bytes
from engines import START_MS, Mail, Position, ReferenceEngine, run_ours
from harness import Namespace
from trio.testing import MockClock
from twins import SCRIPTS, Alarm, Event, Recover, Rewind, Script, Send

from perdure.storage import encode_value
from perdure.storage.schema import KIND_NAMES
from perdure.workflow import RunMode

MakeNamespace = Any


def turns(runs: int) -> list[str]:
    """All ways to change the engine once, and at every stop."""
    words = [first * kept + second * (runs - kept) for first, second in ("ot", "to") for kept in range(1, runs + 1)]
    words += ["".join(islice(cycle(word), runs)) for word in ("ot", "to")]
    return sorted(set(words))


def cases() -> list[Any]:
    return [
        pytest.param(name, word, id=f"{name}-{word}")
        for name, script in SCRIPTS.items()
        for word in turns(len(script.events) + 1)
    ]


Run = Callable[[Position, str], Awaitable[Position]]
"""One engine with one workflow: runs it, or recovers and runs it, from a position to the next."""


def after(position: Position, event: Event | None, number: int) -> Position:
    """What the next run finds: a second has passed, and what happened."""
    position = replace(position, now_ms=position.now_ms + 1000)
    match event:
        case Send():
            mail = [
                Mail(f"message-{number}-{place}", name, encode_value(body), position.now_ms)
                for place, (name, body) in enumerate(event.messages)
            ]
            return replace(position, mail=(*position.mail, *mail))
        case Alarm():
            assert position.alarm_ms is not None, "an alarm is armed"
            return replace(position, now_ms=max(position.now_ms, position.alarm_ms))
        case _:
            return position


def runners(make_namespace: MakeNamespace, mode: RunMode, theirs: ReferenceEngine, name: str) -> dict[str, Run]:
    """Both engines, by their letter."""
    script = SCRIPTS[name]

    async def run_our(position: Position, action: str) -> Position:
        namespace = make_namespace()
        try:
            return await run_ours(namespace, mode, position, script.fn, script.input, action)
        finally:
            await namespace.close()

    async def run_their(position: Position, action: str) -> Position:
        return theirs.run(position, name, script.input, action)

    return {"o": run_our, "t": run_their}


def action_of(event: Event | None, position: Position) -> str:
    """What is done to the workflow before it is run."""
    match event:
        case Recover():
            return "recover"
        case Rewind():
            entries = contents_of(position.kv).entries
            return entries[event.path].id if event.path in entries else "run"
        case _:
            return "run"


async def play(engines: dict[str, Run], script: Script, word: str) -> list[Position]:
    """Where the workflow stands after each run."""
    positions = [Position({}, now_ms=START_MS)]
    for number, (turn, event) in enumerate(zip(word, (None, *script.events), strict=True)):
        position = after(positions[-1], event, number)
        positions.append(await engines[turn](position, action_of(event, position)))
    return positions[1:]


def alike(position: Position, script: Script) -> dict[str, Any]:
    """What is stored there, but for what the engines store otherwise on purpose."""
    meaning = meaning_of(position.kv)
    for place in script.differs:
        for part in (meaning,) if place == "error" else (meaning["entries"], meaning["metadata"]):
            part.pop(place, None)
    return meaning


def in_order(script: Script, effects: tuple[str, ...]) -> list[str]:
    """The effects, in the order in which they took place if that is decided."""
    return sorted(effects) if script.is_concurrent else list(effects)


def has_rewind(script: Script) -> bool:
    """Whether steps are taken back on the way: what a death in the middle of that leaves is not a point of the course."""
    return any(isinstance(event, Rewind) for event in script.events)


def kinds(position: Position) -> dict[str, str]:
    """The kinds of all entries, by their places as the reference engine writes them."""
    return {
        "/".join(part if isinstance(part, str) else f"~{part}" for part in path): KIND_NAMES[type(entry.kind)]
        for path, entry in contents_of(position.kv).entries.items()
    }


@pytest.mark.parametrize(("name", "word"), cases())
async def test_engines_that_take_turns_finish_a_workflow_like_one(
    make_namespace: MakeNamespace,
    mode: RunMode,
    autojump_clock: MockClock,
    theirs: ReferenceEngine,
    name: str,
    word: str,
) -> None:
    """S16: no effect is missing or repeated, the end is the same, and at every stop so is what is stored."""
    script = SCRIPTS[name]
    engines = runners(make_namespace, mode, theirs, name)
    positions = await play(engines, script, word)
    alone = await play(engines, script, "t" * len(word))
    assert positions[-1].result == script.ends
    assert in_order(script, positions[-1].effects) == in_order(script, script.effects)
    for position, expected in zip(positions, alone, strict=True):
        assert position.stored_state == expected.stored_state
        if position.stored_state != "rolling_back":  # a failed handler is raised there, and retried in good time here
            assert position.state == expected.state
        assert position.mail == expected.mail
        assert alike(position, script) == alike(expected, script)
        if not script.differs:
            same_bytes(position.kv, expected.kv)
        assert theirs.load(position.kv) == kinds(position)


@pytest.mark.parametrize("word", ["to", "ot"])
@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if not has_rewind(script)])
async def test_an_engine_takes_over_wherever_the_other_dies(
    mode: RunMode, autojump_clock: MockClock, tmp_path: Path, theirs: ReferenceEngine, name: str, word: str
) -> None:
    """S16, S39: after every write of every run, the other engine goes on and the end is the same."""
    script = SCRIPTS[name]
    dying, following = word
    engines = runners(lambda: Namespace("memory", tmp_path), mode, theirs, name)
    position = Position({}, now_ms=START_MS)
    cuts = 0
    for number, event in enumerate((None, *script.events)):
        position = after(position, event, number)
        position = await engines[dying](position, action_of(event, position))
        for cut in position.writes:
            taken = replace(cut, now_ms=cut.now_ms + 1000)
            taken = await engines[following](taken, action_of(event, taken))
            for later, following_event in enumerate(script.events[number:], number + 1):
                if taken.stored_state in ("completed", "failed") and not isinstance(following_event, Recover):
                    continue  # it is a stop ahead, since its retries were due
                taken = after(taken, following_event, later)
                taken = await engines[following](taken, action_of(following_event, taken))
            assert taken.result in (script.ends, script.retold)
            assert set(taken.effects) == set(script.effects)
            assert len(taken.effects) <= len(script.effects) + 1, "only the step that was under way runs again"
            cuts += 1
    assert cuts >= len(script.events) + 1
