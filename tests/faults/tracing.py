"""Running the program under `strace`: what it asked of the system, in order, and the n-th call made to fail or to be the last.

1. Calls are counted by name (as `strace` does) from the start of the process, in one thread; so the n-th is the same one in each
   run, as far as what comes before it is: the program has one client and one workflow, and `inline` keeps it in one thread.
2. A signal is injected as the call is entered, so the call is not done: to die at the n-th is to die after the one before.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

__all__ = ["CALLS", "SYNCS", "WRITES", "Call", "Way", "points", "run"]

PROGRAM: Final = Path(__file__).with_name("program.py")
WRITES: Final = ("write", "pwrite64", "ftruncate", "mkdir", "link", "rename", "unlink")
"""What changes a file or a directory."""
SYNCS: Final = ("fsync", "fdatasync")
CALLS: Final = (*WRITES, *SYNCS)
_LINE: Final = re.compile(r"^(\d+) +(\w+)\((.*)$")
_PATH: Final = re.compile(r"<(/[^>]*)>")

Mode = Literal["inline", "thread"]
Way = Literal["journal", "files"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the program made.

    Attributes:
        pid: Of the process or thread.
        name: Of the call; "writev" tells what was acknowledged.
        path: The file or directory that it is about.
        text: Its arguments and what it returned, as `strace` shows them.
    """

    pid: int
    name: str
    path: str
    text: str


def points(calls: Sequence[Call], names: Sequence[str]) -> list[tuple[str, int]]:
    """Every call of these names that the program itself made, as its name and number, from 1."""
    program = Counter(call.pid for call in calls).most_common(1)[0][0]
    counts = Counter(call.name for call in calls if call.pid == program and call.name in names)
    return [(name, number) for name, count in sorted(counts.items()) for number in range(1, count + 1)]


def run(scratch: Path, mode: Mode, way: Way, *, fault: str | None = None) -> tuple[int, list[Call]]:
    """Run the program below `scratch`; its exit code, negative for a signal, and the calls that were seen.

    Args:
        scratch: Where its data and what it tells are.
        mode: Whether it does everything in one thread.
        way: Where its workflow is while it is new.
        fault: What is to happen at a call, as `strace` has it: "fsync:signal=KILL:when=3", "write:error=EIO:when=3".
    """
    trace = scratch / "trace"
    inject = [] if fault is None else [f"--inject={fault}"]
    traced = ",".join(CALLS if fault is not None else (*CALLS, "writev"))
    command = ["strace", "-f", "-qq", "-y", "-s", "200", "-o", str(trace), f"--trace={traced}", *inject]
    program = [sys.executable, "-B", str(PROGRAM), str(scratch / "data"), str(scratch / "told"), mode, way]
    ended = subprocess.run([*command, *program], check=False, capture_output=True, text=True, timeout=120)
    if ended.returncode not in (0, 3, -9, 137):
        raise AssertionError(f"{fault}: exit code {ended.returncode}\n{ended.stderr[-4000:]}")
    return ended.returncode, list(_read(trace))


def _read(trace: Path) -> list[Call]:
    found: list[Call] = []
    for line in trace.read_text(errors="replace").splitlines():
        if (match := _LINE.match(line)) is not None:
            path = _PATH.search(match[3])
            found.append(Call(int(match[1]), match[2], "" if path is None else path[1], match[3]))
    return found
