"""The workflows of workflows.mjs beside those of the recordings, in Python, and what is done to them between two runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vectors import SENT_AT_MS as START_MS
from vectors import WORKFLOWS, YEAR_2100_S, Error, Workflow, effects, give, input_of, plain, refuse, stops_of, undo

from perdure.workflow import (
    BlockFailure,
    BlockOk,
    Break,
    Context,
    CriticalError,
    JoinError,
    RaceError,
    RollbackContext,
    StepError,
    StepFailure,
)

AT_MS = YEAR_2100_S * 1000.0
"""When the sleeps of the workflows below end. A float: an integer of 2**32 and more is a BigInt there, which is no time."""

NOON_MS = AT_MS + 250.0
"""One that is no whole number of seconds: JavaScript would store those as integers."""


@dataclass(frozen=True)
class Send:
    """Messages that are sent before the next run, as name and body."""

    messages: tuple[tuple[str, Any], ...]

    def __init__(self, *messages: tuple[str, Any]) -> None:
        object.__setattr__(self, "messages", messages)


class Alarm:
    """Time passes until the armed alarm before the next run."""


class Recover:
    """The failed workflow is made runnable again before the next run."""


@dataclass(frozen=True)
class Rewind:
    """The workflow is replayed from a step before the next run."""

    path: tuple[str | int, ...]


class Again:
    """Nothing: the workflow is to be run again at once."""


Event = Send | Alarm | Recover | Rewind | Again


@dataclass(frozen=True)
class Script:
    """A workflow that both engines have, and its course.

    Attributes:
        fn: It, for this engine.
        input: Its input.
        events: What happens between one run and the next; there is one run more than events.
        ends: What it returns at last, or the name of the error that it ends with.
        effects: What its steps do, in order.
        is_concurrent: Whether they may do it in another order.
        differs: What the engines store otherwise on purpose: paths of entries, or "error".
        retold: What it may return as well when the other engine takes over after a death.
    """

    fn: Workflow
    input: Any = None
    events: tuple[Event, ...] = ()
    ends: Any = None
    effects: tuple[str, ...] = ()
    is_concurrent: bool = False
    differs: tuple[tuple[str | int, ...] | Literal["error"], ...] = ()
    retold: Any = None


async def flaky(effect: str, failures: int) -> int:
    """A step's function that fails the first times."""
    attempt = 1 + sum(done.startswith(effect) for done in effects)
    effects.append(f"{effect} {attempt}")
    if attempt <= failures:
        raise Error(f"boom {attempt}")
    return attempt


async def batch(ctx: Context, _: object) -> dict[str, Any]:
    both = await ctx.queue.next_batch("both", names=["a", "b"], count=3, timeout=60)
    none = await ctx.queue.next_batch("none", names=["c"], timeout=5)
    last = await ctx.queue.next("any")
    return {
        "both": [[message.name, message.body] for message in both],
        "none": len(none),
        "any": [last.name, last.body],
    }


async def listen(ctx: Context, _: object) -> None:
    async def body(inner: Context, _: None) -> Break[None] | None:
        message = await inner.queue.next("word", names=["word"])
        await inner.step("say", give, f"say {message.body}", None)
        return Break(None) if message.body == "end" else None

    await ctx.loop("listen", body)


async def empty(ctx: Context, at_ms: float) -> list[Any]:
    async def once(inner: Context, state: None) -> Break[None]:
        return Break(None)

    seen: list[Any] = [await ctx.step("nothing", give, "nothing", None), await ctx.loop("once", once)]
    seen += [await ctx.step("zero", give, "zero", 0), await ctx.step("text", give, "text", "")]
    seen += [await ctx.step("list", give, "list", []), await ctx.step("no", give, "no", False)]
    await ctx.sleep_until("pause", at_ms / 1000)
    await ctx.step("last", give, "last", None)
    return seen


async def exhausted(ctx: Context, at_ms: float) -> list[Any]:
    caught: str | None = None
    try:
        await ctx.step("fetch", flaky, "fetch", 9, max_retries=2, retry_backoff_base=0.001)
    except StepError as error:
        caught = type(error).__name__
    await ctx.sleep_until("pause", at_ms / 1000)
    return [caught, await ctx.step("instead", give, "instead", "cached")]


async def recovered(ctx: Context, _: object) -> int:
    await ctx.step("before", give, "before", None)
    return await ctx.step("fetch", flaky, "fetch", 2, max_retries=1, retry_backoff_base=0.001)


async def twice(ctx: Context, _: object) -> list[int]:
    return [
        await ctx.step("a", flaky, "a", 1, max_retries=0),
        await ctx.step("b", flaky, "b", 1, max_retries=0),
    ]


NAMES = ("naïve ✓", "漢字", "مرحبا", "🎉", "q:count", "a/b", "~0", "x" * 300)


async def names(ctx: Context, at_ms: float) -> None:
    for name in NAMES:
        await ctx.step(name, give, name, None)
    await ctx.sleep_until("pause", at_ms / 1000)
    await ctx.step("last", give, "last", None)


async def fan(ctx: Context, at_ms: float) -> dict[str, Any]:
    async def slow(branch: Context) -> int:
        await branch.step("begin", give, "begin", 1)
        await branch.sleep_until("nap", at_ms / 1000)
        return await branch.step("end", give, "end", 2)

    async def mail(branch: Context) -> Any:
        return (await branch.queue.next("letter", timeout=200)).body

    async def none(branch: Context) -> None:
        await branch.step("nothing", give, "nothing", None)

    async def empty(branch: Context) -> None:
        return None

    return await ctx.join("all", {"slow": slow, "mail": mail, "none": none, "empty": empty})


async def partial(ctx: Context, at_ms: float) -> list[Any]:
    async def good(branch: Context) -> str:
        return await branch.step("good", give, "good", "fine")

    async def bad(branch: Context) -> None:
        await branch.step("bad", refuse, "bad", "declined")

    async def ugly(branch: Context) -> None:
        await branch.queue.next("ready")
        raise Error("plain")

    failed: list[str] = []
    try:
        await ctx.join("all", {"good": good, "bad": bad, "ugly": ugly})
    except JoinError as error:
        failed = sorted(error.errors)
    await ctx.sleep_until("pause", at_ms / 1000)
    return [failed, await ctx.step("after", give, "after", "went on")]


async def deadline(ctx: Context, at_ms: float) -> list[Any]:
    async def answer(branch: Context) -> Any:
        return (await branch.queue.next("answer", names=["answer"])).body

    async def late(branch: Context) -> str:
        await branch.sleep_until("limit", at_ms / 1000)
        return await branch.step("give up", give, "give up", "late")

    result = await ctx.race("first", {"answer": answer, "late": late})
    await ctx.sleep_until("pause", 2 * at_ms / 1000)
    return [result.winner, result.value, await ctx.step("after", give, "after", "went on")]


async def lost(ctx: Context, at_ms: float) -> list[Any]:
    async def a(branch: Context) -> None:
        await branch.step("a", refuse, "a", "declined")

    async def b(branch: Context) -> None:
        await branch.sleep_until("nap", at_ms / 1000)
        raise Error("plain")

    caught: str | None = None
    try:
        await ctx.race("first", {"a": a, "b": b})
    except RaceError as error:
        caught = type(error).__name__
    await ctx.sleep_until("pause", 2 * at_ms / 1000)
    return [caught, await ctx.step("after", give, "after", "went on")]


async def block(ctx: Context, at_ms: float) -> list[Any]:
    async def careful(inner: Context) -> None:
        await inner.step("one", give, "one", 1)
        await inner.sleep_until("nap", at_ms / 1000)
        await inner.step("two", refuse, "two", "declined", max_retries=0)

    async def easy(inner: Context) -> int:
        return await inner.step("three", give, "three", 3)

    failure = await ctx.try_block("careful", careful)
    assert isinstance(failure, BlockFailure)
    success = await ctx.try_block("easy", easy)
    assert isinstance(success, BlockOk)
    await ctx.sleep_until("pause", 2 * at_ms / 1000)
    await ctx.step("after", give, "after", None)
    return [failure.source, failure.name, failure.error.message, success.value]


async def attempted(ctx: Context, at_ms: float) -> list[Any]:
    result = await ctx.try_step("fetch", flaky, "fetch", 9, max_retries=1, retry_backoff_base=0.001)
    assert isinstance(result, StepFailure)
    await ctx.sleep_until("pause", at_ms / 1000)
    await ctx.step("after", give, "after", None)
    error = result.error
    return [False, result.kind, result.step_name, result.attempts, error.name, error.message]


async def jobs(ctx: Context, at_ms: float) -> list[Any]:
    job = await ctx.queue.next("job", names=["job"], completable=True)
    await ctx.step("work", give, f"work on {job.body}", None)
    await ctx.sleep_until("pause", at_ms / 1000)
    await job.complete()
    more = await ctx.queue.next_batch("more", names=["job"], count=2, completable=True)
    for message in more:
        await message.complete()
    await ctx.sleep_until("end", 2 * at_ms / 1000)
    return [message.body for message in (job, *more)]


async def upgraded(ctx: Context, at_ms: float) -> list[Any]:
    await ctx.step("begin", give, "begin", None)
    await ctx.sleep_until("pause", at_ms / 1000)
    await ctx.removed("old wait", "message")
    version = await ctx.get_version("pricing", 3)
    seconds = await ctx.now("now")
    await ctx.sleep_until("end", 2 * at_ms / 1000)
    return [version, seconds]


async def saga(ctx: Context, at_ms: float) -> None:
    await ctx.rollback_checkpoint("trip")
    await ctx.step("flight", give, "flight", 1, rollback=undo("flight"))
    await ctx.sleep_until("pause", at_ms / 1000)
    await ctx.step("hotel", give, "hotel", 2, rollback=undo("hotel"))
    await ctx.sleep_until("end", 2 * at_ms / 1000)
    await ctx.step("car", give, "car", 3, rollback=undo("car"))
    raise CriticalError("no seats")


async def stubborn(ctx: Context, _: object) -> None:
    async def undo_second(ctx: RollbackContext, output: int) -> None:
        await flaky("undo second", 1)

    await ctx.rollback_checkpoint("start")
    await ctx.step("first", give, "first", 1, rollback=undo("first"))
    await ctx.step("second", give, "second", 2, rollback=undo_second, retry_backoff_base=0.001)
    await ctx.step("third", give, "third", 3, rollback=undo("third"))
    raise CriticalError("no seats")


async def rewound(ctx: Context, at_ms: float) -> list[int]:
    seen = [await ctx.step("first", flaky, "first", 0)]
    await ctx.sleep_until("pause", at_ms / 1000)
    seen.append(await ctx.step("second", flaky, "second", 0))
    await ctx.sleep_until("end", 2 * at_ms / 1000)
    seen.append(await ctx.step("third", flaky, "third", 0))
    return seen


def _recorded(file: str, *events: Event, ends: Any = None, **fields: Any) -> Script:
    last = stops_of(file)[-1]["result"]
    if "threw" in last:
        ends = last["threw"]["name"]
    elif "output" in last:
        ends = plain(last["output"])
    return Script(WORKFLOWS[file], input_of(file), events, ends, **fields)


_TRIED = {"kind": "critical", "message": "declined", "attempts": 1}
_VALUES = ("undefined", "null", "bigint", "date", "set", "map", "nan", "long")

SCRIPTS: dict[str, Script] = {
    "order": _recorded("order", Send(("shipment-confirmed", "TRACK-456")), effects=("pay", "notify")),
    "retry": _recorded("retry", Alarm(), Alarm(), effects=("attempt 1", "attempt 2", "attempt 3")),
    "sleep": _recorded("sleep", Alarm(), ends="woke"),
    "loop": _recorded("loop", Alarm(), effects=tuple(f"add {total}" for total in range(45)), ends={"total": 45}),
    "loopdone": _recorded("loopdone", effects=tuple(f"add {total}" for total in range(45))),
    "values": _recorded("values", effects=_VALUES),
    "errmeta": _recorded("errmeta"),
    "migrate": _recorded("migrate", effects=("price",)),
    "join": _recorded("join", Send(("posts", ["p1", "p2"])), effects=("get", "one", "two"), is_concurrent=True),
    "race": _recorded("race", effects=("work",)),
    "tried": _recorded("tried", effects=("charge",), retold={**_TRIED, "kind": "exhausted"}),
    "rollback": _recorded("rollback", effects=("reserve", "charge", "ship", "undo charge c1", "undo reserve r1")),
    "batch": Script(
        batch,
        events=(Send(("a", 1), ("b", [2])), Alarm(), Send(("z", None))),
        ends={"both": [["a", 1], ["b", [2]]], "none": 0, "any": ["z", None]},
    ),
    "listen": Script(
        listen,
        events=(Send(("word", "one")), Send(("word", "two"), ("word", "three")), Send(("word", "end"))),
        effects=("say one", "say two", "say three", "say end"),
    ),
    "empty": Script(
        empty,
        AT_MS,
        (Alarm(),),
        [None, None, 0, "", [], False],
        ("nothing", "zero", "text", "list", "no", "last"),
    ),
    "exhausted": Script(
        exhausted,
        AT_MS,
        (Alarm(), Alarm(), Alarm()),
        ["StepExhaustedError", "cached"],
        ("fetch 1", "fetch 2", "fetch 3", "instead"),
    ),
    "recovered": Script(
        recovered,
        events=(Alarm(), Recover()),
        ends=3,
        effects=("before", "fetch 1", "fetch 2", "fetch 3"),
        # The wording of an exhausted step's error; and their recover() keeps the text of the attempt that failed before it.
        differs=("error", ("fetch",)),
    ),
    "twice": Script(
        twice,
        events=(Recover(), Recover()),
        ends=[2, 2],
        effects=("a 1", "a 2", "b 1", "b 2"),
        differs=("error", ("a",), ("b",)),
    ),
    "names": Script(names, AT_MS, (Alarm(),), None, (*NAMES, "last")),
    "fan": Script(
        fan,
        START_MS + 100_000.0,
        (Alarm(), Send(("letter", [7]))),
        {"slow": 2, "mail": [7], "none": None, "empty": None},
        ("begin", "nothing", "end"),
        is_concurrent=True,
    ),
    "partial": Script(
        partial,
        AT_MS,
        (Send(("ready", None)), Alarm()),
        [["bad", "ugly"], "went on"],
        ("good", "bad", "after"),
        is_concurrent=True,
        # There, what a step becomes while another branch's write is under way is forgotten; the branch's failure is not.
        differs=(("all", "bad", "bad"),),
    ),
    "deadline met": Script(deadline, AT_MS, (Send(("answer", 42)), Alarm()), ["answer", 42, "went on"], ("after",)),
    "deadline missed": Script(deadline, AT_MS, (Alarm(), Alarm()), ["late", "late", "went on"], ("give up", "after")),
    "lost": Script(
        lost, AT_MS, (Alarm(), Alarm()), ["RaceError", "went on"], ("a", "after"), differs=(("first", "a", "a"),)
    ),
    "block": Script(block, AT_MS, (Alarm(), Alarm()), ["step", "two", "declined", 3], ("one", "two", "three", "after")),
    "attempted": Script(
        attempted,
        AT_MS,
        (Alarm(), Alarm()),
        [False, "exhausted", "fetch", 2, "Error", "boom 2"],
        ("fetch 1", "fetch 2", "after"),
    ),
    "jobs": Script(
        jobs,
        AT_MS,
        (Send(("job", 1)), Send(("job", 2), ("job", 3)), Alarm(), Alarm()),
        [1, 2, 3],
        ("work on 1",),
    ),
    "upgraded": Script(
        upgraded,
        NOON_MS,
        (Alarm(), Alarm()),
        [3, NOON_MS / 1000],
        ("begin",),
        retold=[3, NOON_MS / 1000 + 1],  # a second passes until the other engine is there
    ),
    "saga": Script(
        saga,
        AT_MS,
        (Alarm(), Alarm()),
        "CriticalError",
        ("flight", "hotel", "car", "undo car 3", "undo hotel 2", "undo flight 1"),
    ),
    "stubborn": Script(
        stubborn,
        events=(Again(),),
        ends="CriticalError",
        effects=("first", "second", "third", "undo third 3", "undo second 1", "undo second 2", "undo first 1"),
        # A handler's failure is its message there, and its class and message here.
        differs=(("second",),),
    ),
    "rewound": Script(
        rewound,
        AT_MS,
        (Alarm(), Alarm(), Rewind(("second",)), Rewind(("third",))),
        [1, 2, 3],
        ("first 1", "second 1", "third 1", "second 2", "third 2", "third 3"),
    ),
}
