"""Whether what a soak left is right: the oracle's lines against what is stored, as plain code on plain data.

For every workflow:

1. Its start was acknowledged once, and it is there. It is cancelled if anybody was told so, and failed if anybody was told that
   its deadline had passed; else it completed, unless it was cancelled unseen.
2. Every message that was acknowledged was read once, or waits in its mailbox; none is there twice, or that nobody sent; of
   each sender they are read in the order in which they were sent.
3. The reply to a request is what the step returned that dealt with it. What a recorded step returned is the word that the last
   of its effects left in the oracle: once recorded, it never ran again. All effects of one step have one idempotency key,
   which no other step has. An at-most-once step has one effect.
4. The result is made of just that. Nothing happened once somebody was told that it had ended.
5. The workflow that it called has ended, and returned what it was told. What it sent to a sink is there once, in order, and
   was read by the sink before that was told to stop; what is there without a record of it was on its way when it ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from soak_plans import ASKER, NOTES, SENDERS, Plan, child_id, message_id, workflow_id
from soak_worker import Line

__all__ = ["Picture", "Seen", "check_child", "check_keys", "check_sink", "check_workflow", "gather"]

IN_THREADS = {"thread"}
TURNS = 3


@dataclass(frozen=True, slots=True)
class Picture:
    """What is stored of one workflow.

    Attributes:
        state: The text of its state.
        output: What it returned.
        steps: What each recorded step returned, by path; `None` for one that failed.
        reads: The messages that it read, in order: id and body.
        waiting: The ids of the messages in its mailbox, in order.
        sent: How many messages it has a record of having sent.
    """

    state: str
    output: Any = None
    steps: dict[tuple[str | int, ...], Any] = field(default_factory=dict[tuple["str | int", ...], Any])
    reads: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    waiting: list[str] = field(default_factory=list[str])
    sent: int = 0


@dataclass(slots=True)
class Effect:
    """One thing that happened."""

    name: str
    key: str
    token: str
    is_late: bool


@dataclass(slots=True)
class Seen:
    """What the oracle says of one workflow.

    Attributes:
        effects: What happened, in order.
        told: How often clients were told what.
        sent: The messages that were acknowledged.
        refused: Those that were refused, since it had ended.
        replies: What the asker was answered, by the number of the request.
    """

    effects: list[Effect] = field(default_factory=list[Effect])
    told: Counter[str] = field(default_factory=Counter[str])
    sent: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    refused: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    replies: dict[int, str] = field(default_factory=dict[int, str])


def gather(lines: Iterable[Line]) -> dict[str, Seen]:
    """The lines of the oracle by workflow."""
    found: dict[str, Seen] = defaultdict(Seen)
    for line in lines:
        seen = found[line.workflow_id]
        match line.what, line.rest:
            case "effect", (name, key, token):
                is_late = bool(seen.told["ended"] or seen.told["cancelled"])
                seen.effects.append(Effect(name, key, token, is_late))
            case (("sent" | "refused"), (sender, index)):
                (seen.sent if line.what == "sent" else seen.refused).append((sender, int(index)))
            case "answered", (sender, index, reply):
                seen.sent.append((sender, int(index)))
                seen.replies[int(index)] = reply
            case _:
                seen.told[line.what] += 1
    return found


def check_workflow(plan: Plan, seen: Seen, picture: Picture | None, *, deaths: int) -> list[str]:
    """What is not as it must be; empty when all is."""
    name = workflow_id(plan.number)
    if picture is None:
        return [f"{name}: it is gone"]
    problems = [
        *_check_state(plan, seen, picture),
        *_check_messages(plan, seen, picture),
        *_check_replies(plan, seen, picture),
        *_check_effects(seen, picture, deaths),
    ]
    if picture.state == "completed":
        problems += _check_output(plan, seen, picture)
    return [f"{name}: {problem}" for problem in problems]


def check_child(plan: Plan, seen: Seen, picture: Picture | None, parent: Picture | None, *, deaths: int) -> list[str]:
    """What is not as it must be with the workflow that one called; `picture` is `None` where there is none."""
    name = child_id(plan.number)
    is_called = parent is not None and parent.state == "completed" and plan.has_child
    if picture is None:
        return [f"{name}: it is gone"] if is_called else []
    allowed = {"completed"} if is_called else {"completed", "cancelled"}
    problems = [] if picture.state in allowed else [f"it is {picture.state}"]
    problems += _check_effects(seen, picture, deaths)
    if is_called and parent is not None and parent.output["tokens"].get("child") != picture.output:
        problems.append(f"it returned {picture.output}, and its caller was told {parent.output['tokens'].get('child')}")
    return [f"{name}: {problem}" for problem in problems]


def check_sink(name: str, seen: Seen, picture: Picture | None, senders: dict[int, Picture]) -> list[str]:
    """What is not as it must be with a sink; `senders` are those that send to it, by number."""
    if picture is None:
        return [f"{name}: it is gone"]
    problems = [] if picture.state == "completed" else [f"it is {picture.state}"]
    if (seen.told["spawned"], seen.told["ended"]) != (1, 1):
        problems.append(f"its start and end were told {seen.told['spawned']} and {seen.told['ended']} times")
    bodies = [body for _, body in picture.reads if body is not None]
    if picture.waiting:
        problems.append(f"messages wait: {picture.waiting}")
    if picture.output != len(bodies):
        problems.append(f"it counted {picture.output} messages, and read {len(bodies)}")
    by_sender: dict[int, list[int]] = defaultdict(list)
    for number, index in bodies:
        by_sender[number].append(index)
    for number in {*by_sender, *senders}:
        arrived, sender = by_sender[number], senders.get(number)
        if sender is None:
            problems.append(f"{workflow_id(number)} does not send here")
        elif arrived != list(range(len(arrived))) or not sender.sent <= len(arrived) <= NOTES:
            problems.append(f"{workflow_id(number)} sent {sender.sent}, and what arrived is {arrived}")
        elif sender.state != "completed" and len(arrived) > sender.sent + 1:
            problems.append(f"{workflow_id(number)} ended at message {sender.sent}, and what arrived is {arrived}")
    return [f"{name}: {problem}" for problem in problems]


def check_keys(seen: Iterable[Seen]) -> list[str]:
    """No idempotency key is that of two steps, of whichever workflows."""
    owners: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for number, one in enumerate(seen):
        for effect in one.effects:
            owners[effect.key].add((number, effect.name))
    return [f"several steps have the key {key}" for key, found in owners.items() if len(found) > 1]


def _check_state(plan: Plan, seen: Seen, picture: Picture) -> Iterator[str]:
    told = seen.told
    if told["spawned"] != 1:
        yield f"its start was acknowledged {told['spawned']} times"
    if told["ended"] != 1:
        yield f"its end was told {told['ended']} times"
    if told["failed"]:
        yield "it failed"
    if told["expired"] and plan.deadline_s is None:
        yield "it failed at a deadline that it did not have"
    if told["cancelled"] or told["expired"]:
        allowed = {"cancelled"} if told["cancelled"] else {"failed"}
    else:
        allowed = {"completed", "cancelled"} if plan.is_cancelled else {"completed"}
    if picture.state not in allowed:
        yield f"it is {picture.state}"


def _check_messages(plan: Plan, seen: Seen, picture: Picture) -> Iterator[str]:
    read = [found for found, _ in picture.reads]
    there = Counter([*read, *picture.waiting])
    planned = plan.letters
    for found, count in there.items():
        if count > 1:
            yield f"message {found} is there {count} times"
        if found not in planned:
            yield f"nobody sent message {found}"
    for sender, index in seen.sent:
        if not there[message_id(plan.number, sender, index)]:
            yield f"message {sender}/{index} was acknowledged and is lost"
    for sender, index in seen.refused:
        # It may be there all the same: stored when a kill kept its sender from being told, and the workflow ended by then.
        if picture.state == "completed" and message_id(plan.number, sender, index) in read:
            yield f"message {sender}/{index} was read, and refused when it was sent again"
    for sender in (*SENDERS, ASKER):
        order = [planned[found][1] for found in (*read, *picture.waiting) if planned.get(found, ("",))[0] == sender]
        if order != sorted(order):
            yield f"the messages of {sender} are in the order {order}"
    if len(set(seen.sent)) != len(seen.sent):
        yield "a message was acknowledged twice"
    wrong = [body for found, body in picture.reads if found in planned and body != list(planned[found])]
    if wrong:
        yield f"bodies were read that were not sent: {wrong}"


def _check_replies(plan: Plan, seen: Seen, picture: Picture) -> Iterator[str]:
    """A reply is what the step that dealt with the request returned, whenever and how often it was asked for."""
    places = {found: place for place, (found, _) in enumerate(picture.reads)}
    for index, reply in seen.replies.items():
        place = places.get(message_id(plan.number, ASKER, index))
        recorded = picture.steps.get((f"handle-{place}",))
        if reply != recorded:
            yield f"request {index} was answered with {reply}, and what dealt with it returned {recorded}"
    if seen.told["changed"]:
        yield "a reply was another when it was asked for again"
    if seen.told["unanswered"] and picture.state == "completed":
        yield "it completed, and left a request unanswered"


def _check_effects(seen: Seen, picture: Picture, deaths: int) -> Iterator[str]:
    by_name: dict[str, list[Effect]] = defaultdict(list)
    names: dict[str, str] = {}
    for effect in seen.effects:
        by_name[effect.name].append(effect)
        names[effect.token] = effect.name
        if effect.is_late and effect.name not in IN_THREADS:
            yield f"the effect {effect.name} came after its end"
    for name, effects in by_name.items():
        if len({effect.key for effect in effects}) > 1:
            yield f"step {name} had several keys"
        # An eviction may stop a step between its effect and its record, as a death does.
        if len(effects) > deaths + seen.told["did"] + 2:
            yield f"the effect {name} happened {len(effects)} times in {deaths} deaths"
    if len(by_name["charge"]) > 1:
        yield f"it was charged {len(by_name['charge'])} times"
    for path, token in picture.steps.items():
        if token is None:
            continue
        if token not in names:
            yield f"step {path} returned what no effect left"
        elif by_name[names[token]][-1].token != token:
            yield f"step {path} ran again after it was recorded"


def _check_output(plan: Plan, seen: Seen, picture: Picture) -> Iterator[str]:
    output: dict[str, Any] = dict(picture.output)
    tokens: dict[str, str] = output.pop("tokens")
    last = {effect.name: effect.token for effect in seen.effects}
    expected: dict[str, Any] = {name: last.get(name) for name in _always_done(plan)}
    expected["charge"] = "interrupted" if tokens.get("charge") == "interrupted" else last.get("charge")
    if plan.has_child:
        expected["child"] = tokens.get("child")  # what the child returned is compared in `check_child`
    expected["raced"] = "never" if output.get("winner") == "loser" else last.get("quick")
    if tokens != expected:
        yield f"it returned {tokens}, where its effects were {expected}"
    if output != {
        "number": plan.number,
        "bodies": [body for _, body in picture.reads],
        "winner": output.get("winner"),
        "turns": TURNS,
    }:
        yield f"it returned {output}"
    if picture.sent != (NOTES if plan.sink is not None else 0):
        yield f"it has a record of {picture.sent} messages sent"
    if len(picture.reads) != plan.reads:
        yield f"it read {len(picture.reads)} messages of {plan.reads}"
    missing = {*_always_done(plan), *(f"turn-{turn}" for turn in range(TURNS))} - set(last)
    if missing:
        yield f"effects are missing: {sorted(missing)}"
    if sum(effect.name == "shaky" for effect in seen.effects) < 2:
        yield "the shaky step was not retried"


def _always_done(plan: Plan) -> Sequence[str]:
    return ["prepare", "shaky", "thread", *(f"handle-{index}" for index in range(plan.reads)), "left", "right"]
