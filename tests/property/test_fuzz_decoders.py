"""Every decoder, given damaged bytes: a value that can be stored again, or the error that its docstring says.

1. None is left out: what is named like a decoder is found in the source (`support/decoders.py`).
2. Sound bytes are what real runs store (`support/guests.py`) and the reference engine's recordings; damage is made of them
   (`support/damage.py`), and of arbitrary bytes.
3. It costs neither memory nor time: what is claimed and not there is not believed, and no depth overflows a stack.

`make fuzz` does the same for as long as it is told to, guided by what of the code is reached.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterator

import figures
import pytest
import trio
from damage import misshapen, mutated
from decoders import DECODERS, HISTORIES, SAMPLES, SEALED, THROUGH, Decoder, decoders_of_packages
from guests import GUEST, recorded
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from strategies import shape
from trio.testing import MockClock
from vectors import VECTORS, dump_of, stops_of

from perdure.storage.naming import file_name
from perdure.storage.own_layout import schedule_run_key

ROUNDS = 300
each_decoder = pytest.mark.parametrize("name", DECODERS)


def _pairs() -> Iterator[tuple[bytes, bytes]]:
    for moment in ("races", "rolls back"):
        found = trio.run(recorded, moment, clock=MockClock(autojump_threshold=0))
        for workflow_id, pairs in found.namespaces.items():
            if workflow_id == GUEST or moment == "races":
                yield from pairs.items()
        OWN.update(found.own)
    for path in VECTORS.glob("*.json"):
        yield from dump_of(stops_of(path.stem)[-1]).items()


OWN: dict[bytes, bytes] = {}
PAIRS = list(_pairs())
SOUND: dict[str, list[bytes]] = {
    "key": list(dict.fromkeys(key for key, _ in PAIRS)),
    "value": [*dict.fromkeys(value for _, value in PAIRS), *SAMPLES],
    "sealed": [*SEALED, *dict.fromkeys(value for _, value in PAIRS)],
    "own key": [*OWN, schedule_run_key("nightly", 1_700_000_000_000)],
    "own": [*OWN.values(), *SAMPLES],
    "only": [b"3/after+0/before@seed7", b"no crash"],
    "history": [*HISTORIES],
    "name": [
        file_name("order-1", session=1, count=2).encode(),
        b"ValueError: it failed",
        b"CriticalError: no",
    ],
}
"""What real runs leave, by kind."""


def attempt(decoder: Decoder, data: bytes) -> object:
    """What is decoded, or `None` where it is refused. Every other exception ends the test, with the bytes."""
    figures.count("fuzzed inputs")
    try:
        found = decoder.decode(data)
    except decoder.refusals:
        return None
    except BaseException as error:
        error.add_note(f"of {data.hex()}")
        raise
    if decoder.encode is not None:
        again = decoder.decode(decoder.encode(found))
        assert shape(again) == shape(found), data.hex()
    return found


def test_every_decoder_of_the_packages_is_fuzzed() -> None:
    """S41: a new one that is not in the list of `support/decoders.py` makes this red."""
    fuzzed = {name.partition(" ")[0] for name in DECODERS}
    assert set(decoders_of_packages()) == fuzzed - {
        "storage.rebuild.parent_id_of",
        "storage.coded_values.open_value",
    } | set(THROUGH)
    assert set(THROUGH.values()) <= set(DECODERS)


@each_decoder
def test_damaged_bytes_are_refused_or_can_be_stored_again(name: str) -> None:
    """S41: flipped, cut, spliced, of another shape: drawn from what is sound. And some of what is sound is decoded."""
    decoder = DECODERS[name]
    figures.count("fuzzed decoders")
    draw = random.Random(name)
    sound = SOUND[decoder.kind]
    assert any(attempt(decoder, data) is not None for data in sound)
    usable = [data for data in sound if attempt(decoder, data) is not None]
    for _ in range(ROUNDS):
        attempt(decoder, mutated(draw.choice(usable), sound, draw))
    for data in draw.sample(usable, min(3, len(usable))):
        for odd in misshapen(data):
            attempt(decoder, odd)


@each_decoder
@given(data=st.binary(max_size=64))
@example(b"")
@example(b"\x81" * 100_000)
@example(b"\xa1\x01" * 50_000)
@example(b"\xd8\x64" * 50_000)
@example(b"\x05" * 100_000)
@example(b"\xff" * 100_000)
@example(b"\x9f" * 100_000)
@example(b"[" * 100_000)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_arbitrary_and_deep_bytes_are_refused_or_can_be_stored_again(name: str, data: bytes) -> None:
    """S41: no other error, `RecursionError` and `MemoryError` among them."""
    attempt(DECODERS[name], data)


CLAIMS = (
    b"\xff\xff\xff\xff\x0f",
    b"\xff" * 9 + b"\x01",
    b"\x5a\xff\xff\xff\xff",
    b"\x9a\xff\xff\xff\xff",
    b"\xbb\x7f" + b"\xff" * 7,
    b"\xd9\x01\x02\x9b\x00" + b"\xff" * 7,
    b"\xc4\x82\x3b\x7f" + b"\xff" * 7 + b"\x01",
    b"\xc4\x82\x1b\x7f" + b"\xff" * 7 + b"\x01",
    b"\xc1\xfb\x7f\xef" + b"\xff" * 6,
)
"""The heads of what would be huge if it were there."""


@each_decoder
def test_what_is_claimed_takes_neither_memory_nor_time(name: str) -> None:
    """S41: damage costs an error, and not the process."""
    decoder = DECODERS[name]
    draw = random.Random(name)
    began = time.perf_counter()
    tracemalloc.start()
    try:
        for data in draw.sample(SOUND[decoder.kind], min(8, len(SOUND[decoder.kind]))):
            for claim in CLAIMS:
                for place in {0, draw.randrange(len(data) + 1), draw.randrange(len(data) + 1), len(data)}:
                    attempt(decoder, data[:place] + claim + data[place:])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3_000_000
    assert time.perf_counter() - began < 30
