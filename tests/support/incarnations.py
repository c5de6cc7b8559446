"""A pytest plugin: how many simulated processes the suite killed, at which writes, and whether these are enough.

Whatever kills a simulated process says so here: the harness, the disks of the supervisor's tests, and `perdure.testing`.

1. A process counts as an incarnation only if it was killed at a write, before or after it, and had made new history by then
   itself: an entry, an entry's metadata, or the workflow's end was durable. One that only replayed does not count, nor does one
   killed between writes (in a step's function, while it waits): both are shown, and no more.
2. Nothing is looked at until a process dies: what a test pays for this is one look at the batches of the process that died.
3. A death is shown under each kind of entry that the batch held at which it came; so a row of the histogram says how often this
   kind was on its way to the disk, and the rows add up to more than there were deaths.
4. Under pytest-xdist workers send plain lists, and only the controller judges and prints.

Rejected: counting tests, or calls of the explorers. Those do not know whether a process that was killed had done anything.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import pytest

from perdure.storage import layout
from perdure.storage.schema import KIND_NAMES, decode_entry, decode_metadata

if TYPE_CHECKING:
    from perdure.storage import Batch

__all__ = ["COLUMNS", "Tally", "has_history", "kinds_in", "record", "record_write_points", "tally", "watch_kit"]

Column: TypeAlias = Literal["before", "after", "again", "between"]
"""Just before a write, just after it, at a write of a later process of the same disk; or not at a write."""

COLUMNS: Final[tuple[Column, ...]] = ("before", "after", "again", "between")
OUTPUT_KEY: Final = "incarnations"
ENDS: Final = (layout.OUTPUT_KEY, layout.ERROR_KEY)
RECORDS: Final = (layout.HISTORY_PREFIX, layout.METADATA_PREFIX)


@dataclass(slots=True)
class Tally:
    """What was counted.

    Attributes:
        counted: The incarnations: killed at a write, after new history.
        early: Killed at a write, before new history.
        between: Killed between writes.
        write_points: The writes at which an enumeration killed, each once for each run that was enumerated.
        cells: The incarnations, by kind of entry and column; and those killed between writes, by file.
        files: The incarnations, by test file.
    """

    counted: int = 0
    early: int = 0
    between: int = 0
    write_points: int = 0
    cells: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    files: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: Tally) -> None:
        """Add what another process counted."""
        self.counted += other.counted
        self.early += other.early
        self.between += other.between
        self.write_points += other.write_points
        self.cells += other.cells
        self.files += other.files

    def clear(self) -> None:
        """Begin anew."""
        self.counted = self.early = self.between = self.write_points = 0
        self.cells.clear()
        self.files.clear()

    def pack(self) -> list[Any]:
        """As plain values, which is what pytest-xdist and JSON can hold."""
        cells = [[*cell, count] for cell, count in self.cells.items()]
        return [self.counted, self.early, self.between, self.write_points, cells, dict(self.files)]

    @classmethod
    def unpack(cls, packed: list[Any]) -> Tally:
        """The opposite of `pack`."""
        counted, early, between, write_points, cells, files = packed
        found = Counter({(kind, column): count for kind, column, count in cells})
        return cls(counted, early, between, write_points, found, Counter(files))

    def report(self) -> dict[str, Any]:
        """The figures, for a file."""
        kinds = sorted({kind for kind, _ in self.cells})
        return {
            "python": platform.python_version(),
            "incarnations": self.counted,
            "killed_before_new_history": self.early,
            "killed_between_writes": self.between,
            "write_points": self.write_points,
            "histogram": {kind: {column: self.cells[kind, column] for column in COLUMNS[:3]} for kind in kinds},
            "files": dict(sorted(self.files.items())),
        }

    def lines(self) -> list[str]:
        """The figures, to be read."""
        histogram: dict[str, dict[str, int]] = self.report()["histogram"]
        width = max([len(kind) for kind in histogram] + [len("at a write of")])
        head = f"{'at a write of':{width}} " + "".join(f"{column:>9}" for column in COLUMNS[:3])
        ranked = sorted(histogram.items(), key=lambda item: -sum(item[1].values()))
        where = f", at {self.write_points:,} enumerated writes among others" if self.write_points else ""
        return [
            f"{self.counted:,} simulated processes killed after they had made new history{where}",
            f"(not counted: {self.early:,} killed at a write before that, {self.between:,} killed between writes)",
            head,
            *(f"{kind:{width}} " + "".join(f"{row[column]:9,}" for column in COLUMNS[:3]) for kind, row in ranked),
        ]


tally: Final = Tally()
"""What this process counted so far."""

_current: list[str] = []
"""The file of the test that runs."""


def has_history(batches: Iterable[Batch]) -> bool:
    """Whether one of these batches makes new history: an entry, an entry's metadata, or the workflow's end."""
    return any(key.startswith(RECORDS) or key in ENDS for batch in batches for key, _ in batch.puts)


def kinds_in(batch: Batch) -> set[str]:
    """What a batch is about: the kinds of its entries; or what else it holds, when it holds none."""
    kinds: set[str] = set()
    for key, value in batch.puts:
        if key.startswith(layout.HISTORY_PREFIX):
            kinds.add(KIND_NAMES[type(decode_entry(value).kind)])
        elif key.startswith(layout.METADATA_PREFIX):
            metadata = decode_metadata(value)
            if metadata.rollback_completed_at_ms is not None or metadata.rollback_error is not None:
                kinds.add("rollback handler")
        elif key in ENDS:
            kinds.add("end")
    if kinds:
        return kinds
    keys = [key for key, _ in batch.puts]
    for prefix, kind in (
        (layout.METADATA_PREFIX, "attempt"),
        (layout.INPUT_KEY, "birth"),
        (layout.MAILBOX_PREFIX, "mailbox"),
        (layout.DETAIL_PREFIX, "detail"),
        (layout.STATE_KEY, "state"),
    ):
        if any(key.startswith(prefix) for key in keys):
            return {kind}
    return {"bookkeeping"}


def record(
    column: Column, written: Iterable[Batch], dying: Batch | None, *, again: bool = False, what: str = "bookkeeping"
) -> None:
    """A simulated process died.

    Args:
        column: Where: `before` or `after` a write, or `between`.
        written: What it had made durable by then; with `after`, the write at which it died included.
        dying: What it was writing.
        again: Whether it was recovering from such a death itself.
        what: What it was writing, if that is no batch.
    """
    if column == "between":
        tally.between += 1
        return
    if not has_history(written):
        tally.early += 1
        return
    tally.counted += 1
    tally.files[_current[-1] if _current else "elsewhere"] += 1
    for kind in {what} if dying is None else kinds_in(dying):
        tally.cells[kind, "again" if again else column] += 1


def record_write_points(count: int) -> None:
    """An enumeration has killed at each of so many writes."""
    tally.write_points += count


# The kit's processes report here as well; it does not know of us.


def watch_kit() -> None:
    """Be told of the deaths of the kit's processes, from now on; once in a process."""
    from perdure.testing.explorer import Exploration, Explorer
    from perdure.testing.faults import WriteGate

    died, explored = WriteGate.die, Explorer.explore

    def die(self: WriteGate) -> None:
        if not self.is_dead:
            point = self.died_at
            is_after = point is not None and point in self.writes
            column: Column = "between" if point is None else "after" if is_after else "before"
            record(
                column,
                [write.batch for write in self.writes if write.batch is not None],
                None if point is None else point.batch,
                again=self.life > 0,
                what="bookkeeping" if point is None else point.kind,
            )
        died(self)

    def explore(self: Explorer) -> Exploration:
        exploration = explored(self)
        if self.asked.only is None:
            record_write_points(exploration.write_points)
        return exploration

    WriteGate.die = die  # type: ignore[method-assign]
    Explorer.explore = explore  # type: ignore[method-assign]


# The plugin.


class Incarnations:
    """One session of the plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.total = tally
        self.is_short = False

    @property
    def output(self) -> dict[str, Any] | None:
        """Where an xdist worker leaves what the controller is to have; `None` in any other process."""
        return cast("dict[str, Any] | None", getattr(self.config, "workeroutput", None))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Know whose deaths these are."""
        _current.append(item.nodeid.partition("::")[0])
        try:
            return (yield)
        finally:
            _current.pop()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a finished xdist worker counted."""
        packed = getattr(node, "workeroutput", {}).get(OUTPUT_KEY)
        if packed is not None:
            self.total.add(Tally.unpack(packed))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send what was counted, or judge it."""
        if self.output is not None:
            self.output[OUTPUT_KEY] = self.total.pack()
            return
        option = self.config.option
        if option.incarnations_file is not None:
            path = self.config.invocation_params.dir / option.incarnations_file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.total.report(), indent=2) + "\n", encoding="utf-8")
        self.is_short = self.total.counted < option.incarnations
        if self.is_short and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was counted, where a file or a least number of them was asked for."""
        option = self.config.option
        if not (option.incarnations or option.incarnations_file):
            return
        terminalreporter.section("simulated processes", red=self.is_short)
        for line in self.total.lines():
            terminalreporter.write_line(line)
        if self.is_short:
            terminalreporter.write_line(f"these are fewer than the {option.incarnations:,} that are due", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the plugin's options."""
    group = parser.getgroup("incarnations")
    group.addoption("--incarnations", type=int, default=0, metavar="N", help="fail if fewer simulated processes died")
    group.addoption("--incarnations-file", metavar="PATH", help="write how many died where, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Start a session of the plugin."""
    watch_kit()
    config.pluginmanager.register(Incarnations(config), "incarnations session")
