"""The soak in small, and that its checks see what they are there to see."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import soak
from soak import campaign
from soak_checks import Picture, check_child, check_keys, check_sink, check_workflow, gather
from soak_plans import Plan, message_id, plan_of
from soak_worker import Line, Options


def test_workflows_killed_at_random_until_finished_are_as_if_never_killed(tmp_path: Path) -> None:
    """S18, S22, S27, S32, S33, S42, S43, S45, S47: in small; `make kill9` and `make soak` are larger."""
    seed = random.randrange(1_000_000)
    options = Options(workflows=15, seed=seed, max_live=4, idle_timeout=0.02, is_coded=seed % 2 == 1)
    report = campaign(tmp_path, options, deaths=5, life_s=0.4)
    assert report.problems == [], f"seed {seed}"
    assert report.killed + report.stopped > 2, f"seed {seed}: it was hardly killed at all"
    assert report.effects >= 10 * (options.workflows - report.cancelled - report.expired), f"seed {seed}"


@pytest.mark.parametrize(
    ("arguments", "done"),
    [
        ("--incarnations 50000", ["real 7", "simulated 50000"]),
        ("--incarnations 50000 --simulated", ["simulated 50000"]),
        ("", ["real 7"]),
    ],
)
def test_real_processes_first_then_simulated_ones_or_those_alone(
    arguments: str, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def real(options: Options, **_: Any) -> bool:
        seen.append(f"real {options.seed}")
        return True

    def simulated(least: int, first: int) -> bool:
        seen.append(f"simulated {least}")
        return True

    monkeypatch.setattr(soak, "_round", real)
    monkeypatch.setattr("soak_incarnations.run", simulated)
    monkeypatch.setattr("sys.argv", ["soak.py", "--seed", "7", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    assert (ended.value.code, seen) == (False, done)


@pytest.mark.parametrize("arguments", ["--simulated", "--simulated --incarnations 5 --minutes 1"])
def test_simulated_ones_alone_need_their_number(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["soak.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    assert ended.value.code == 2
    assert "--simulated goes with --incarnations" in capsys.readouterr().err


def test_a_seed_gives_the_same_plan_in_every_process() -> None:
    plans = [plan_of(7, number, 1000) for number in range(1000)]
    assert plans == [plan_of(7, number, 1000) for number in range(1000)]
    assert plans != [plan_of(8, number, 1000) for number in range(1000)]
    assert {act for plan in plans for act in plan.acts} == {"wake", "evict", "look", "pause", "recover", "cancel"}
    assert 50 < sum(plan.is_cancelled for plan in plans) < 200


# The checks. A workflow as it should be, and one change of it or of what was seen for each thing that can be wrong.

PLAN = Plan(
    number=1,
    delay_s=0.0,
    messages=1,
    asks=0,
    naps={},
    pause_s=0.0,
    sink=None,
    has_child=False,
    is_left_alone=False,
    start_s=0.0,
    deadline_s=None,
    acts=(),
)
NAMES = ["prepare", "shaky", "shaky", "thread", "charge", "handle-0", "handle-1", "left", "right", "quick",
         "turn-0", "turn-1", "turn-2"]  # fmt: skip
IDS = [message_id(1, "a", 0), message_id(1, "b", 0)]


def lines_of() -> list[Line]:
    told = [Line("spawned", "soak-1", ()), Line("sent", "soak-1", ("a", "0")), Line("sent", "soak-1", ("b", "0"))]
    effects = [Line("effect", "soak-1", (name, f"key-{name}", f"{name}-{number}")) for number, name in enumerate(NAMES)]
    return [*told, *effects, Line("ended", "soak-1", ())]


def tokens() -> dict[str, str]:
    return {name: f"{name}-{number}" for number, name in enumerate(NAMES)}


def picture_of() -> Picture:
    last = tokens()
    returned = {name: last[name] for name in NAMES if not name.startswith(("turn", "quick"))} | {"raced": last["quick"]}
    output = {"number": 1, "bodies": [["a", 0], ["b", 0]], "tokens": returned, "winner": "quick", "turns": 3}
    steps: dict[tuple[str | int, ...], Any] = {(name,): last[name] for name in NAMES}
    return Picture("completed", output, steps, [(IDS[0], ["a", 0]), (IDS[1], ["b", 0])])


def problems_of(lines: list[Line], picture: Picture | None, plan: Plan = PLAN) -> list[str]:
    seen = gather(lines)
    return [*check_workflow(plan, seen["soak-1"], picture, deaths=0), *check_keys(seen.values())]


def test_nothing_is_said_of_what_is_right() -> None:
    assert problems_of(lines_of(), picture_of()) == []


def without(what: str, *rest: str) -> list[Line]:
    return [line for line in lines_of() if not (line.what == what and line.rest[: len(rest)] == rest)]


def again(name: str, key: str | None = None) -> list[Line]:
    *lines, ended = lines_of()
    return [*lines, Line("effect", "soak-1", (name, key or f"key-{name}", "another")), ended]


def output_with(**changes: Any) -> Picture:
    picture = picture_of()
    return replace(picture, output=picture.output | changes)


WRONG: dict[str, tuple[str, list[Line], Picture | None]] = {
    "gone": ("it is gone", lines_of(), None),
    "not ended": ("it is sleeping", lines_of(), replace(picture_of(), state="sleeping")),
    "cancelled by nobody": ("it is cancelled", lines_of(), replace(picture_of(), state="cancelled")),
    "completed though cancelled": (
        "it is completed",
        [*lines_of(), Line("cancelled", "soak-1", ())],
        picture_of(),
    ),
    "expired": ("a deadline that it did not have", [*lines_of(), Line("expired", "soak-1", ())], picture_of()),
    "failed": ("it failed", [*lines_of(), Line("failed", "soak-1", ("E",))], picture_of()),
    "started twice": ("acknowledged 2 times", [*lines_of(), Line("spawned", "soak-1", ())], picture_of()),
    "end told twice": ("told 2 times", [*lines_of(), Line("ended", "soak-1", ())], picture_of()),
    "message lost": (
        "a/0 was acknowledged and is lost",
        lines_of(),
        replace(picture_of(), reads=[(IDS[1], ["b", 0])]),
    ),
    "message read twice": (
        "is there 2 times",
        lines_of(),
        replace(picture_of(), reads=[*picture_of().reads, (IDS[0], ["a", 0])]),
    ),
    "message read and kept": ("is there 2 times", lines_of(), replace(picture_of(), waiting=[IDS[0]])),
    "message from nobody": ("nobody sent message x", lines_of(), replace(picture_of(), waiting=["x"])),
    "message refused and read": (
        "was read, and refused",
        [*without("sent", "a"), Line("refused", "soak-1", ("a", "0"))],
        picture_of(),
    ),
    "message acknowledged twice": (
        "acknowledged twice",
        [*lines_of(), Line("sent", "soak-1", ("a", "0"))],
        picture_of(),
    ),
    "another body": (
        "bodies were read that were not sent",
        lines_of(),
        replace(output_with(bodies=[["a", 9], ["b", 0]]), reads=[(IDS[0], ["a", 9]), (IDS[1], ["b", 0])]),
    ),
    "run again": ("ran again after it was recorded", again("left"), picture_of()),
    "charged twice": ("it was charged 2 times", again("charge"), picture_of()),
    "several keys": ("had several keys", again("left", "another"), picture_of()),
    "one key for two": ("several steps have the key key-left", again("right", "key-left"), picture_of()),
    "effect after the end": (
        "the effect left came after its end",
        [*lines_of(), Line("effect", "soak-1", ("left", "key-left", "another"))],
        picture_of(),
    ),
    "too many effects": (
        "happened 4 times in 0 deaths",
        [*again("left")[:-1], *2 * again("left")[-2:-1], Line("ended", "soak-1", ())],
        picture_of(),
    ),
    "effect missing": ("what no effect left", without("effect", "left"), picture_of()),
    "turn missing": (
        "effects are missing: .'turn-1'.",
        without("effect", "turn-1"),
        replace(picture_of(), steps={}),
    ),
    "not retried": (
        "was not retried",
        [line for line in lines_of() if line.rest[2:] != ("shaky-1",)],
        picture_of(),
    ),
    "another result": ("it returned", lines_of(), output_with(turns=2)),
    "another token": ("it returned", lines_of(), output_with(tokens={**tokens(), "left": "x"})),
    "too few reads": (
        "it read 1 messages of 2",
        without("sent", "b"),
        replace(picture_of(), reads=picture_of().reads[:1]),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what: str) -> None:
    said, lines, picture = WRONG[what]
    problems = "\n".join(problems_of(lines, picture))
    assert re.search(said, problems), problems


def test_a_reply_that_is_wrong_is_seen() -> None:
    plan = replace(PLAN, asks=1)
    asked = message_id(1, "q", 0)
    handled = Line("effect", "soak-1", ("handle-2", "key-handle-2", "handle-2-9"))
    told = Line("answered", "soak-1", ("q", "0", "handle-2-9"))
    lines = [*lines_of()[:-1], handled, told, Line("ended", "soak-1", ())]
    right = picture_of()
    right = replace(
        right,
        reads=[*right.reads, (asked, ["q", 0])],
        steps=right.steps | {("handle-2",): "handle-2-9"},
        output=right.output
        | {"bodies": [["a", 0], ["b", 0], ["q", 0]], "tokens": right.output["tokens"] | {"handle-2": "handle-2-9"}},
    )
    assert problems_of(lines, right, plan) == []
    another = [told._replace(rest=("q", "0", "another")) if line is told else line for line in lines]
    assert any("request 0 was answered with another" in problem for problem in problems_of(another, right, plan))
    assert any("is lost" in problem for problem in problems_of(lines, replace(right, reads=right.reads[:2]), plan))
    for what, said in (("changed", "asked for again"), ("unanswered", "left a request unanswered")):
        more = [*lines, Line(what, "soak-1", ("q", "0"))]
        assert any(said in problem for problem in problems_of(more, right, plan))


# Between workflows.

CHILD = replace(PLAN, has_child=True)
CHILD_LINES = [Line("effect", "soak-1.child", ("child", "key-child", "told"))]


def child_problems(child: Picture | None, parent: Picture) -> list[str]:
    return check_child(CHILD, gather(CHILD_LINES)["soak-1.child"], child, parent, deaths=0)


def parent_told(token: str | None) -> Picture:
    return output_with(tokens={**picture_of().output["tokens"], "child": token})


def test_nothing_is_said_of_a_child_that_is_right() -> None:
    done = Picture("completed", "told", {("child",): "told"})
    cancelled = replace(picture_of(), state="cancelled", output=None)
    assert child_problems(done, parent_told("told")) == []
    assert child_problems(done, cancelled) == child_problems(None, cancelled) == []
    assert child_problems(Picture("cancelled"), cancelled) == []
    lines = [*lines_of()[:-1], Line("ended", "soak-1", ())]
    assert problems_of(lines, parent_told("told"), CHILD) == []


@pytest.mark.parametrize(
    ("said", "child", "parent"),
    [
        ("it is gone", None, parent_told("told")),
        ("it is cancelled", Picture("cancelled"), parent_told("told")),
        ("it is sleeping", Picture("sleeping"), replace(picture_of(), state="cancelled", output=None)),
        ("its caller was told another", Picture("completed", "told", {("child",): "told"}), parent_told("another")),
        ("what no effect left", Picture("completed", "another", {("child",): "another"}), parent_told("another")),
    ],
)
def test_what_is_wrong_with_a_child_is_said(said: str, child: Picture | None, parent: Picture) -> None:
    assert said in "\n".join(child_problems(child, parent))


SINK_LINES = [Line("spawned", "sink-0", ()), Line("ended", "sink-0", ())]


def sink_of(*bodies: list[int], state: str = "completed", waiting: tuple[str, ...] = ()) -> Picture:
    reads: list[tuple[str, Any]] = [(f"id-{number}", body) for number, body in enumerate(bodies)]
    return Picture(state, len(bodies), reads=[*reads, ("stop", None)], waiting=list(waiting))


def sink_problems(sink: Picture | None, sent: int = 2, state: str = "completed") -> list[str]:
    return check_sink("sink-0", gather(SINK_LINES)["sink-0"], sink, {1: replace(picture_of(), state=state, sent=sent)})


def test_nothing_is_said_of_a_sink_that_is_right() -> None:
    assert sink_problems(sink_of([1, 0], [1, 1])) == []
    assert sink_problems(sink_of([1, 0]), sent=1, state="cancelled") == []
    assert sink_problems(sink_of([1, 0]), sent=0, state="cancelled") == [], "it was on its way"


@pytest.mark.parametrize(
    ("said", "sink", "sent", "state"),
    [
        ("it is gone", None, 2, "completed"),
        ("it is sleeping", sink_of([1, 0], [1, 1], state="sleeping"), 2, "completed"),
        ("messages wait", sink_of([1, 0], [1, 1], waiting=("x",)), 2, "completed"),
        ("what arrived is [0]", sink_of([1, 0]), 2, "completed"),
        ("what arrived is []", sink_of(), 1, "cancelled"),
        ("what arrived is [1, 0]", sink_of([1, 1], [1, 0]), 2, "completed"),
        ("what arrived is [0, 0]", sink_of([1, 0], [1, 0]), 2, "completed"),
        ("what arrived is [0, 1]", sink_of([1, 0], [1, 1]), 0, "cancelled"),
        ("does not send here", sink_of([1, 0], [1, 1], [2, 0]), 2, "completed"),
        ("it counted 3", replace(sink_of([1, 0], [1, 1]), output=3), 2, "completed"),
    ],
)
def test_what_is_wrong_with_a_sink_is_said(said: str, sink: Picture | None, sent: int, state: str) -> None:
    assert said in "\n".join(sink_problems(sink, sent, state))


def test_messages_of_one_sender_out_of_order_are_seen() -> None:
    plan = replace(PLAN, messages=2)
    first, second = message_id(1, "a", 0), message_id(1, "a", 1)
    lines = [*lines_of(), Line("sent", "soak-1", ("a", "1"))]
    picture = replace(picture_of(), reads=[(second, ["a", 1]), (first, ["a", 0]), (IDS[1], ["b", 0])])
    assert any("in the order [1, 0]" in problem for problem in problems_of(lines, picture, plan))
    waiting = replace(picture, reads=[(second, ["a", 1]), (IDS[1], ["b", 0])], waiting=[first])
    assert any("in the order [1, 0]" in problem for problem in problems_of(lines, waiting, plan))
