"""The bytes of the journal: what a segment begins with, and the records in it.

    segment    magic `PDURJRNL`, u16 version (1), 16 bytes of salt, u32 CRC-32 of all that; then records; then zeros
    record     u32 length of what follows the CRC, u32 CRC-32 of that, begun from the CRC of the salt; then
               u8 kind, u32 number of the workflow, and
      1 Born     the name of its file, UTF-8
      2 Batch    four counts (u32): deletes, prefixes, ranges, puts; the lengths (u32) of all their keys and values, in that
                 order; then these themselves
      3 Filed    nothing: its file has it all

1. All integers are little-endian. An alarm is the put or the deletion of its key, so that replay knows no alarms.
2. Reading ends at the first record that is not whole: a length of zero, one that reaches past the end, or a CRC that does not
   fit. What lies behind it was not acknowledged as durable, as records are written in their order, and synced before anybody is
   told; unless the disk has changed what it was given, which cannot be told from a power cut.
3. The salt keeps what lay on the disk before from being taken for a record.

Rejected: BARE, as for entries. Lengths of a fixed size are packed for a whole batch in one call, and one is written with each
transition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct, pack
from typing import Final, TypeAlias
from zlib import crc32

from perdure.storage.driver import Batch
from perdure.storage.errors import CorruptStoreError, FormatVersionError
from perdure.storage.layout import ALARM_KEY
from perdure.storage.limits import alarm_value

__all__ = [
    "HEADER_BYTES",
    "SALT_BYTES",
    "Born",
    "Changed",
    "Filed",
    "Record",
    "batch_record",
    "born_record",
    "filed_record",
    "is_torn",
    "read_segment",
    "seed_of",
    "segment_header",
]

_MAGIC: Final = b"PDURJRNL"
_VERSION: Final = 1
"""Stored on disk; a larger one is refused."""
SALT_BYTES: Final = 16
"""How many random bytes each segment has in its header."""
_HEADER: Final = Struct(f"<8sH{SALT_BYTES}s")
HEADER_BYTES: Final = _HEADER.size + 4
"""Where the records begin."""

_FRAME: Final = Struct("<II")
_HEAD: Final = Struct("<BI")
_COUNTS: Final = Struct("<IIII")
_LENGTH: Final = Struct("<I")
_BORN, _BATCH, _FILED = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Born:
    """A workflow was made, and has no file yet.

    Attributes:
        number: What later records call it by.
        file: The name that its file will have.
    """

    number: int
    file: str


@dataclass(frozen=True, slots=True)
class Changed:
    """A batch of it."""

    number: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Filed:
    """It has a file, in which all of it is, or it is gone for good."""

    number: int


Record: TypeAlias = Born | Changed | Filed
"""What a segment is made of."""


def segment_header(salt: bytes) -> bytes:
    """What a segment begins with."""
    head = _HEADER.pack(_MAGIC, _VERSION, salt)
    return head + _LENGTH.pack(crc32(head))


def seed_of(salt: bytes) -> int:
    """What the CRCs of a segment's records are begun from."""
    return crc32(salt)


def born_record(seed: int, number: int, file: str) -> bytes:
    """The bytes of a `Born`."""
    return _framed(seed, _HEAD.pack(_BORN, number) + file.encode())


def filed_record(seed: int, number: int) -> bytes:
    """The bytes of a `Filed`."""
    return _framed(seed, _HEAD.pack(_FILED, number))


def batch_record(seed: int, number: int, batch: Batch) -> bytes:
    """The bytes of a `Changed`, for a batch that `check_batch` has passed."""
    deletes, puts = batch.deletes, batch.puts
    if batch.alarm is not None:
        stored = alarm_value(batch.alarm)
        if stored is None:
            deletes = [*deletes, ALARM_KEY]
            puts = [pair for pair in puts if pair[0] != ALARM_KEY]  # the alarm comes last, deletions first
        else:
            puts = [*puts, (ALARM_KEY, stored)]
    parts = [*deletes, *batch.delete_prefixes]
    for pair in batch.delete_ranges:
        parts += pair
    for pair in puts:
        parts += pair
    pieces = [_HEAD.pack(_BATCH, number)]
    pieces.append(_COUNTS.pack(len(deletes), len(batch.delete_prefixes), len(batch.delete_ranges), len(puts)))
    pieces.append(pack(f"<{len(parts)}I", *map(len, parts)))
    pieces += parts
    return _framed(seed, b"".join(pieces))


def read_segment(data: bytes, path: str) -> Iterator[Record]:
    """The records of a segment, up to the first that is not whole.

    Args:
        data: The segment's bytes.
        path: Where they are from; errors carry it.

    Raises:
        FormatVersionError: A newer Perdure wrote it.
        CorruptStoreError: Its header is damaged, which no crash does.
    """
    header = data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    magic, version, salt = _HEADER.unpack_from(header)
    if magic != _MAGIC or _LENGTH.unpack_from(header, _HEADER.size)[0] != crc32(header[: _HEADER.size]):
        raise CorruptStoreError(
            f"{path} is damaged; restore it, or remove it to go on without what only it knows of workflows that were new",
            path=path,
        )
    if version > _VERSION:
        raise _newer(path, version)
    for content, _ in _contents(data, seed_of(salt)):
        yield _record(content, path)


def is_torn(data: bytes) -> bool:
    """Whether anything lies behind the last whole record of a segment: what a power cut left of others, or damage."""
    ends = [end for _, end in _contents(data, seed_of(_HEADER.unpack_from(data)[2]))]
    return bool(data[ends[-1] if ends else HEADER_BYTES :].strip(b"\0"))


def _contents(data: bytes, seed: int) -> Iterator[tuple[bytes, int]]:
    """The contents of the whole records, and where each ends."""
    at = HEADER_BYTES
    while at + _FRAME.size <= len(data):
        length, check = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        content = data[at : at + length]
        if length < _HEAD.size or len(content) < length or crc32(content, seed) != check:
            return
        at += length
        yield content, at


def _framed(seed: int, content: bytes) -> bytes:
    return _FRAME.pack(len(content), crc32(content, seed)) + content


def _record(content: bytes, path: str) -> Record:
    kind, number = _HEAD.unpack_from(content)
    match kind:
        case 1:
            return Born(number, content[_HEAD.size :].decode())
        case 2:
            return Changed(number, _batch(content))
        case 3:
            return Filed(number)
        case _:
            raise _newer(path, kind)


def _batch(content: bytes) -> Batch:
    deletes, prefixes, ranges, puts = _COUNTS.unpack_from(content, _HEAD.size)
    count = deletes + prefixes + 2 * ranges + 2 * puts
    at = _HEAD.size + _COUNTS.size
    lengths = Struct(f"<{count}I").unpack_from(content, at)
    at += 4 * count
    parts: list[bytes] = []
    for length in lengths:
        parts.append(content[at : at + length])
        at += length
    each = iter(parts)
    return Batch(
        deletes=[next(each) for _ in range(deletes)],
        delete_prefixes=[next(each) for _ in range(prefixes)],
        delete_ranges=[(next(each), next(each)) for _ in range(ranges)],
        puts=[(next(each), next(each)) for _ in range(puts)],
    )


def _newer(path: str, found: int) -> FormatVersionError:
    return FormatVersionError(
        f"{path} was written by a newer Perdure; upgrade Perdure to open its directory",
        path=path,
        found=found,
        supported=_VERSION,
    )
