"""Plays: a small workflow, a script of what is done to it from outside, and a process that dies at every recorded transition.

1. The script is a function over a `Stage`, whose methods are acts. Each is awaited until it is acknowledged, and then is over:
   the next process plays the script from the top and passes over these, so it goes on where the one before it died. What
   was not acknowledged is done again: messages with their ids, a wake or a cancellation a second time.
2. `play` runs the play once without a death, and then once for every write and each side of it, and again with a second
   death at the first write of the recovery. Every one of these has to come to the end of the first: what the acts returned,
   state, output or error, history with its metadata and details, mailbox; only ids and times may differ.
3. No effect is missing or new, one that was acknowledged does not recur, and a death repeats an effect at most once.
4. A workflow that has ended is started once more at the end of each: it comes to the same, and nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypeVar

import trio
from harness import (
    Crash,
    Exploration,
    Fault,
    FaultyDriver,
    Host,
    MovableClock,
    Namespace,
    crashes,
    host,
    is_crash,
    scheduled,
)
from worlds import World, WorldFunction

from perdure.storage import StorageError, decode_value, layout
from perdure.storage.schema import KIND_NAMES, decode_message
from perdure.workflow import (
    FaultError,
    HistoryEntry,
    RunMode,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowState,
    WorkflowSuspendedError,
    start_workflow,
)

T = TypeVar("T")
Stop: TypeAlias = "tuple[Any, ...]"
"""How a run stopped: ("completed", output), ("failed", name, message), ("cancelled",) or ("waits", has deadline, names)."""

Script: TypeAlias = "Callable[[Stage], Awaitable[None]]"

Options: TypeAlias = "Callable[[Stage], dict[str, Any]]"
"""What each process is given besides, such as its hooks."""

_PATIENCE_S: Final = 1e11
_BUSY: Final = ("busy",)


class Stage:
    """One play: its world and its clock, which outlive processes, and the acts that are over.

    Attributes:
        namespace: The workflow's bytes.
        world: What is outside, with the workflow's code in it.
        clock: Wall-clock time.
        acts: What the acts that are over returned, in order.
        deaths: How often its process died.
        kills: How many of these deaths the play itself brought about.
    """

    def __init__(
        self, namespace: Namespace, mode: RunMode, function: WorldFunction, options: Options, begins_ms: int
    ) -> None:
        self.namespace = namespace
        self.mode: RunMode = mode
        self.options = options
        self.world = World(function)
        self.clock = MovableClock(begins_ms - round(trio.current_time() * 1000))
        self.acts: list[Any] = []
        self.deaths = -1
        self.kills = 0
        self._targets: dict[int, float] = {}
        self._next = 0
        self._is_up = False
        self._process: Host | None = None

    async def live(self, script: Script) -> None:
        """One life of a process: the script from where it is to its end."""
        self._next = 0
        self.deaths += 1
        options = self.options(self)
        async with host(
            self.namespace, self.mode, clock=self.clock, seed=1000 * (self.deaths + 1), **options
        ) as self._process:
            with trio.fail_after(_PATIENCE_S):
                await script(self)

    def kill(self) -> NoReturn:
        """For a step's function: its process dies here. The play goes on with the next."""
        self.kills += 1
        self.namespace.kill()

    @property
    def process(self) -> Host:
        """The process that is alive."""
        assert self._process is not None, "acts are for scripts"
        return self._process

    async def act(self, do: Callable[[], Awaitable[T]]) -> T:
        """Do something, once it is the turn of that, and remember what it returned."""
        number = self._next
        self._next += 1
        if number < len(self.acts):
            done: T = self.acts[number]
            return done
        outcome = await do()
        self.acts.append(outcome)
        return outcome

    # Acts.

    async def run(self) -> Stop:
        """Run the workflow until it waits or has ended; time passes only where a step's function takes some."""

        async def do() -> Stop:
            self._is_up = True
            return await self._stop_or_pass()

        return await self.act(do)

    async def finish(self) -> Stop:
        """Run it to its end, letting time pass where it sleeps."""

        async def do() -> Stop:
            self._is_up = True
            while True:
                stopped = await self._stop_or_pass()
                if stopped[0] != "waits":
                    return stopped
                deadline_ms = await (await self.namespace.driver()).get_alarm(self.process.workflow_id)
                assert deadline_ms is not None, f"nobody sends {stopped[2]}"
                await self.process.advance(max(0.001, (deadline_ms - self.clock.now_ms()) / 1000))

        return await self.act(do)

    async def send(self, name: str, body: object = None, *, id: str | None = None) -> str:
        """Send a message."""
        message_id = id or f"message {self._next}"

        async def do() -> str:
            try:
                await self.process.send(name, body, id=message_id)
            except WorkflowEndedError:
                return "refused"
            return "sent"

        return await self.act(do)

    async def pass_time(self, seconds: float) -> None:
        """Let time pass; in live mode the workflow runs meanwhile."""
        target = self._targets.setdefault(self._next, trio.current_time() + seconds)

        async def do() -> None:
            if self._is_up and self.mode == "live" and self.process.handle is None:
                await self._stop_or_pass()  # it is up again before anything else happens
            await self.process.advance(max(0.0, target - trio.current_time()))

        await self.act(do)

    async def wake(self) -> None:
        """Wake it."""
        await self.act(lambda: self.process.control("wake"))

    async def cancel(self) -> None:
        """Cancel it."""
        await self.act(lambda: self.process.control("cancel"))

    async def recover(self, *again: str) -> None:
        """Recover it; the steps that are named may run again though they were acknowledged."""

        async def do() -> None:
            self.world.acknowledged = {path for path in self.world.acknowledged if path[-1] not in again}
            await self.process.control("recover")

        await self.act(do)

    async def evict(self) -> None:
        """Evict it, if it is in memory."""

        async def do() -> None:
            self._is_up = False
            await self.process.evict()

        await self.act(do)

    async def stop_after(self, seconds: float, action: Literal["cancel", "evict"]) -> Stop:
        """Run it for a time, then cancel or evict it in the middle of what it does; how that run ended."""

        async def do() -> Stop:
            await self.process.evict()
            await self.process.down()
            async with trio.open_nursery() as nursery:
                handle = await start_workflow(
                    nursery,
                    self.process.workflow_id,
                    self.world.workflow,
                    None,
                    await self.namespace.driver(),
                    mode="yield" if self.mode == "yield" else "live",
                    clock=self.clock,
                    ids=self.process.ids(),
                    on_history_updated=self.process.on_history_updated,
                    on_error=self.process.on_error,
                )
                await self.process.advance(seconds)
                await getattr(handle, action)()
                try:
                    return ("completed", await handle.result())
                except WorkflowFailedError as error:
                    return ("failed", error.name, error.error.message)
                except WorkflowCancelledError:
                    return ("cancelled",)
                except WorkflowSuspendedError:
                    return ("left",)

        return await self.act(do)

    async def restart(self) -> None:
        """The process ends, and another takes its place."""

        async def do() -> None:
            self._is_up = False
            await self.process.restart()

        await self.act(do)

    async def deploy(self, function: WorldFunction) -> None:
        """Restart with other code."""

        async def do() -> None:
            self._is_up = False
            self.world.function = function
            await self.process.restart()

        await self.act(do)

    async def refused(self, error: type[FaultError], *, is_clean: bool = True) -> str:
        """Run it, and be refused; the error's text. Nothing is written by that.

        Args:
            error: The class of the fault.
            is_clean: Whether the fault comes before anything is recorded by this run.
        """

        async def do() -> str:
            self._is_up = False
            before = await self.namespace.dump()
            try:
                stopped = await self._stop_or_pass()
            except error as refusal:
                text = f"{type(refusal).__name__}: {refusal}"
            else:
                raise AssertionError(f"it was not refused, but {stopped}")
            await self.process.restart()
            after = await self.namespace.dump()
            if is_clean:
                for key, value in after.items():
                    # Only that the workflow exists and was activated may have been written.
                    is_field = key.startswith((layout.WORKFLOW_PREFIX, layout.OWN_PREFIX))
                    assert before.get(key) == value or is_field, f"{key!r} was written"
                assert before.keys() <= after.keys() | {layout.IDLE_ACTIVATIONS_KEY}
            assert layout.IDLE_ACTIVATIONS_KEY not in after
            return text

        return await self.act(do)

    async def do(self, what: Callable[[], Awaitable[T]]) -> T:
        """Anything else; the workflow must not be in memory."""

        async def do() -> T:
            await self.process.down()
            return await what()

        return await self.act(do)

    async def state(self) -> WorkflowState:
        """The stored state."""

        async def do() -> WorkflowState:
            return (await self.namespace.snapshot()).state

        return await self.act(do)

    async def look(self) -> dict[str, Any]:
        """What is stored, as `picture_of` has it."""
        return await self.act(lambda: picture_of(self.namespace))

    async def _stop_or_pass(self) -> Stop:
        while True:
            stopped = await self._stop()
            if stopped != _BUSY:
                return stopped
            # Live mode, and a step's function is in progress: let time pass to whatever is due next.
            await self.process.advance(max(0.0, trio.lowlevel.current_statistics().seconds_to_next_deadline))

    async def _stop(self) -> Stop:
        try:
            result = await self.process.stop(self.world.workflow)
        except WorkflowFailedError as error:
            return ("failed", error.name, error.error.message)
        except WorkflowCancelledError:
            return ("cancelled",)
        if result.state is WorkflowState.COMPLETED:
            return ("completed", result.output)
        if result.sleep_until is None and result.waiting_for_messages is None:
            return _BUSY
        return ("waits", result.sleep_until is not None, result.waiting_for_messages)


# What is stored, without ids and times.


async def picture_of(namespace: Namespace) -> dict[str, Any]:
    """All that is stored, as plain data that is equal where two say the same."""
    snapshot = await namespace.snapshot()
    dump = await namespace.dump()
    paths = {entry.id: entry.path for entry in snapshot.entries}
    details: dict[Any, Any] = {}
    starts: dict[Any, Any] = {}
    mail: list[Any] = []
    for key, value in dump.items():
        if key.startswith(layout.DETAIL_PREFIX):
            details[paths[layout.parse_detail_key(key)]] = _without_ids(decode_value(value), paths)
        elif key.startswith(layout.LOOP_START_PREFIX):
            entry_id, iteration = layout.parse_loop_start_key(key)
            starts[paths[entry_id], iteration] = value
        elif key.startswith(layout.MAILBOX_PREFIX):
            message = decode_message(value)
            mail.append((message.id, message.name, decode_value(message.body)))
        elif key.startswith(layout.METADATA_PREFIX):
            assert layout.parse_metadata_key(key) in paths, "metadata of a forgotten entry"
    error = snapshot.error
    alarm = await (await namespace.driver()).get_alarm("workflow-1")
    assert alarm is None or not snapshot.state.is_terminal, "what has ended has no alarm"
    return {
        "state": snapshot.state,
        "output": snapshot.output,
        "error": error and (error.name, error.message, dict(error.metadata), error.stack is None),
        "causes": _without_ids(_decoded(dump.get(layout.FAILURE_CAUSES_KEY)), paths),
        "entries": {entry.path: _line(entry) for entry in snapshot.entries},
        "order": [entry.path for entry in sorted(snapshot.entries, key=lambda entry: entry.id) if len(entry.path) == 1],
        "details": details,
        "loop starts": starts,
        "names": {value for key, value in dump.items() if key.startswith(layout.NAMES_PREFIX)},
        "mail": mail,
        "known ids": {value for key, value in dump.items() if key.startswith(layout.DEDUP_PREFIX)},
        "idle activations": dump.get(layout.IDLE_ACTIVATIONS_KEY),
        "completions": dump.get(layout.COMPLETION_SEQUENCE_KEY),
    }


def _decoded(data: bytes | None) -> Any:
    return None if data is None else decode_value(data)


def _line(entry: HistoryEntry) -> Any:
    data = {key: value for key, value in entry.data.items() if key != "deadline_ms"}
    if isinstance(data.get("body"), dict):
        data["body"] = {key: data["body"].get(key) for key in ("id", "name", "body", "completed")}
    if data.get("winner") is not None:  # whether a loser was parked or not as it lost is the scheduler's
        for branch in data["branches"].values():
            if branch["status"] in ("running", "cancelled"):
                branch["status"] = "lost"
    metadata = entry.metadata
    if metadata is None:
        return entry.kind, data, None
    is_undone = metadata.rollback_completed_at_ms is not None
    return entry.kind, data, (metadata.status, metadata.attempts, metadata.error, is_undone, metadata.rollback_error)


_TIMES: Final = frozenset({"stack", "rollback_last_ms"})


def _without_ids(value: Any, paths: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(part, paths) for key, part in value.items() if key not in _TIMES}
    if isinstance(value, list):
        return [_without_ids(part, paths) for part in value]
    return paths.get(value, value) if isinstance(value, str) else value


def comparable(value: Any) -> Any:
    """The same with text in place of what is not equal to itself."""
    if isinstance(value, dict):
        return {key: comparable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(comparable(part) for part in value)
    return "NaN" if value != value else value


def names_of(picture: dict[str, Any], *kinds: str) -> list[Any]:
    """The paths of the entries of these kinds, or of all, in order."""
    assert set(kinds) <= set(KIND_NAMES.values())
    return sorted((path for path, line in picture["entries"].items() if not kinds or line[0] in kinds), key=repr)


# Playing.


async def play(
    make_namespace: Callable[[], Namespace],
    mode: RunMode,
    function: WorldFunction,
    script: Script,
    *,
    any_of: Collection[str] = (),
    at_most_once: Collection[str] = (),
    is_settled: bool = True,
    faults: Sequence[Fault] = (),
    check: Callable[[Stage, dict[str, Any]], None] | None = None,
    options: Options = lambda stage: {},
    begins_ms: int = 1_700_000_000_000,
    is_twice_everywhere: bool = False,
) -> Exploration:
    """Play to the end without a death, then with one at every write, and then with two; the ends have to be the same.

    Args:
        make_namespace: Makes an empty namespace.
        mode: How the workflow is run.
        function: The workflow, which is also given its world.
        script: What is done to it.
        any_of: Names of steps whose functions may or may not be called, depending on where the process dies.
        at_most_once: Names of steps whose functions may be called once at most, and that may be recorded as interrupted.
        is_settled: Whether the end does not depend on where the process dies. Else it is `check` that says what is right.
        faults: Let the storage fail in these ways at every write as well, once, while the process lives.
        check: Looks at the end of each play, and at what is stored.
        options: What each process is given besides.
        begins_ms: The wall clock's time as the curtain rises.
        is_twice_everywhere: Whether the second death has its turn at every write of the recovery, and not at the first only.
    """
    stages: dict[Namespace, Stage] = {}
    reference: list[tuple[Stage, dict[str, Any]]] = []

    async def scenario(namespace: Namespace) -> Stage:
        if namespace not in stages:
            stages[namespace] = Stage(namespace, mode, function, options, begins_ms)
            stages[namespace].world.facts["stage"] = stages[namespace]
        stage = stages[namespace]
        while True:
            kills = stage.kills
            try:
                await stage.live(script)
            except BaseException as error:
                if stage.kills == kills or not is_crash(error):
                    raise
            else:
                return stage

    async def checked(stage: Stage, namespace: Namespace, crash: Crash | None) -> None:
        picture = await picture_of(namespace)
        if not reference:
            reference.append((stage, picture))
        first, expected = reference[0]
        _check_effects(stage, first, any_of, at_most_once)
        if is_settled:
            assert comparable(stage.acts) == comparable(first.acts), crash
            different = {key for key in expected if comparable(picture[key]) != comparable(expected[key])}
            assert not different, f"{crash}: {[(key, expected[key], picture[key]) for key in different]}"
        if check is not None:
            check(stage, picture)
        if picture["state"].is_terminal:
            await _start_again(stage, namespace)

    exploration = await crashes(
        scenario, make_namespace, checked, is_twice=True, is_twice_everywhere=is_twice_everywhere
    )
    for fault in faults:
        explored = 0
        while await _play_with_fault(make_namespace(), fault, explored, scenario, checked):
            explored += 1
        assert explored == exploration.counted, "explored equals counted"
    return exploration


async def played_once(
    make_namespace: Callable[[], Namespace], mode: RunMode, function: WorldFunction, script: Script
) -> dict[str, Any]:
    """What is stored after a play in which nobody dies, without ids and times."""
    namespace = make_namespace()
    await Stage(namespace, mode, function, lambda stage: {}, 1_700_000_000_000).live(script)
    picture = await picture_of(namespace)
    await namespace.close()
    return picture


def _check_effects(stage: Stage, first: Stage, any_of: Collection[str], at_most_once: Collection[str]) -> None:
    assert stage.world.recurred == [], "what was acknowledged happened again"
    expected, happened = Counter(first.world.effects), Counter(stage.world.effects)
    for path in expected | happened:
        if path[-1] in at_most_once:
            assert happened[path] <= 1, path
        elif path[-1] not in any_of:
            assert expected[path] <= happened[path] <= expected[path] + stage.deaths - stage.kills, path
            assert expected[path], f"{path} is new"


async def _start_again(stage: Stage, namespace: Namespace) -> None:
    before, effects = await namespace.dump(), list(stage.world.effects)
    last = next(act for act in reversed(stage.acts) if isinstance(act, tuple))
    async with host(namespace, stage.mode, clock=stage.clock) as stage._process:
        assert comparable(await stage._stop()) == comparable(last)
        assert await namespace.dump() == before, "a workflow that has ended was written to"
    assert stage.world.effects == effects, "a workflow that has ended ran something"


async def _play_with_fault(
    namespace: Namespace,
    fault: Fault,
    number: int,
    scenario: Callable[[Namespace], Awaitable[Stage]],
    checked: Callable[[Stage, Namespace, Crash | None], Awaitable[None]],
) -> bool:
    """Whether there was a write of that number to fail."""
    left = number

    def is_due(_: object) -> bool:
        nonlocal left
        left -= 1
        return left < 0

    driver = await namespace.driver()
    driver.inner = faulty = FaultyDriver(driver.inner, fault, is_due)
    try:
        with scheduled(1):
            stage = await scenario(namespace)
        if str(stage.mode) == "hosted":  # the supervisor has restarted it, as a next process would
            stage.deaths += 1
    except StorageError as error:
        if "by the test" not in str(error):
            raise
        await namespace.restart()
        stage = await scenario(namespace)
    await checked(stage, namespace, None)
    await namespace.close()
    return faulty.has_failed


__all__ = ["Script", "Stage", "Stop", "names_of", "picture_of", "play", "played_once"]
