"""Fuzz every decoder, guided by what of the code is reached, then whole namespaces; for as long as is said.

1. What reaches a line (from another line) that nothing reached before is kept, and damaged further. That is found out with
   Python's own tracing, in this process; no instrumented build is needed.
2. Each finding is printed with its bytes and the line that repeats it. The exit code says whether there was one.
3. `tests/property/` does a fixed part of the same in every test run, without the guidance.

Rejected: atheris and its like: a native extension that has to be had for every Python, for decoders of some hundred lines.

Usage: fuzz.py [--seconds 90] [--seed N] [--only NAME] [--repeat NAME HEX]
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

import trio  # noqa: E402
from damage import misshapen, mutated  # noqa: E402
from decoders import DECODERS, HISTORIES, SAMPLES, SEALED, Decoder  # noqa: E402
from guests import BYSTANDER, MOMENTS, Guest, recorded  # noqa: E402
from harness import scheduled  # noqa: E402
from strategies import shape  # noqa: E402
from survival import Damage, host_with, read_with  # noqa: E402
from trio.testing import MockClock  # noqa: E402
from vectors import VECTORS, dump_of, stops_of  # noqa: E402

PACKAGES = tuple(str(ROOT / layer / "perdure") for layer in ("storage", "workflow", "actors", "testing"))
Edge = tuple[str, int, int]


class Coverage:
    """The steps from line to line that were ever taken."""

    def __init__(self) -> None:
        self.edges: set[Edge] = set()
        self._new = False

    def reaches_new(self, call: Callable[[], object]) -> bool:
        """Call, and say whether it took a step that none took before."""
        self._new = False
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(None)
        return self._new

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGES):
            return None
        before = frame.f_lineno

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "line":
                edge = (name, before, before := frame.f_lineno)
                if edge not in self.edges:
                    self.edges.add(edge)
                    self._new = True
            return step

        return step


def attempt(decoder: Decoder, data: bytes) -> None:
    """Decode, and encode what came of it; raises what must not come of that."""
    try:
        found = decoder.decode(data)
    except decoder.refusals:
        return
    if decoder.encode is not None and shape(decoder.decode(decoder.encode(found))) != shape(found):
        raise AssertionError("what was decoded is another once it was stored again")


def seeds(guests: dict[str, Guest]) -> dict[str, list[bytes]]:
    """Sound bytes, by kind."""
    pairs = [pair for guest in guests.values() for stored in guest.namespaces.values() for pair in stored.items()]
    for path in VECTORS.glob("*.json"):
        pairs += dump_of(stops_of(path.stem)[-1]).items()
    own = {key: value for guest in guests.values() for key, value in guest.own.items()}
    values = list(dict.fromkeys(value for _, value in pairs))
    return {
        "key": list(dict.fromkeys(key for key, _ in pairs)),
        "value": [*values, *SAMPLES],
        "sealed": [*SEALED, *values],
        "own key": list(own),
        "own": [*own.values(), *SAMPLES],
        "only": [b"3/after+0/before@seed7", b"no crash"],
        "history": list(HISTORIES),
        "name": [b"order-0123456789abcdef0123456789abcdef.0000000100000002.sqlite", b"ValueError: no"],
    }


def fuzz_decoder(name: str, corpus: list[bytes], draw: random.Random, until: float) -> tuple[int, int, str | None]:
    """Fuzz one of them until then; how often it was called, how much was kept, and what was found."""
    decoder, coverage, calls = DECODERS[name], Coverage(), 0
    kept: list[bytes] = []

    def feed() -> Iterator[bytes]:
        yield from corpus
        while True:
            yield mutated(draw.choice(kept or corpus), corpus, draw)

    for data in feed():
        if time.monotonic() > until:
            break
        calls += 1
        began = time.monotonic()
        try:
            if coverage.reaches_new(lambda data=data: attempt(decoder, data)):  # type: ignore[misc]
                kept.append(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return calls, len(kept), f"{type(error).__name__}: {error}\n  repeat: --repeat '{name}' {data.hex()}"
        if time.monotonic() - began > 5:
            return calls, len(kept), f"it took over 5 seconds\n  repeat: --repeat '{name}' {data.hex()}"
    return calls, len(kept), None


async def fuzz_namespaces(guests: dict[str, Guest], draw: random.Random, seconds: float) -> tuple[int, list[str]]:
    """Damage values of whole namespaces, read them and host them; how many, and what was found."""
    count, found = 0, []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        moment = draw.choice(list(guests))
        guest = guests[moment]
        workflow_id = draw.choice([*(name for name in guest.namespaces if name != BYSTANDER), ""])
        pairs = guest.namespaces[workflow_id] if workflow_id else guest.own
        key = draw.choice(list(pairs))
        value = (
            draw.choice([*misshapen(pairs[key])])
            if draw.random() < 0.4
            else mutated(pairs[key], [*pairs.values()], draw)
        )
        damage = Damage(workflow_id, key, None if draw.random() < 0.05 else value)
        count += 1
        try:
            if workflow_id:
                await read_with(guest, damage)
            await host_with(guest, damage)
        except Exception as error:
            found.append(f"at the moment {moment!r}, {damage}: {error!r}")
    return count, found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="how long in all (default: 90)")
    parser.add_argument("--seed", type=int, default=None, help="draws everything; another one each time unless given")
    parser.add_argument("--only", default="", help="only decoders whose name holds this")
    parser.add_argument("--repeat", nargs=2, metavar=("NAME", "HEX"), help="one decoder, these bytes")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.repeat:
        attempt(DECODERS[options.repeat[0]], bytes.fromhex(options.repeat[1]))
        return 0
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    draw = random.Random(seed)
    guests: dict[str, Guest] = {}
    for moment in MOMENTS:
        with scheduled(1):
            guests[moment] = trio.run(recorded, moment, clock=MockClock(autojump_threshold=0))
    corpus = seeds(guests)
    names = [name for name in DECODERS if options.only in name]
    share = options.seconds / (len(names) + (0 if options.only else len(names)))
    findings: list[str] = []
    for name in names:
        calls, kept, finding = fuzz_decoder(name, corpus[DECODERS[name].kind], draw, time.monotonic() + share)
        print(f"{name}: {calls} inputs, {kept} kept", flush=True)
        if finding is not None:
            findings.append(f"{name}: {finding}")
    if not options.only:
        clock = MockClock(autojump_threshold=0)
        count, found = trio.run(fuzz_namespaces, guests, draw, options.seconds / 2, clock=clock)
        print(f"{count} damaged namespaces")
        findings += found
    for finding in findings:
        print(f"FOUND {finding}")
    print(f"{len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
