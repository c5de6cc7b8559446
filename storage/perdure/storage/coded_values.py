"""Where user data is in what is stored, and stored values with it coded: plain code on bytes.

1. A value that is user data as a whole (input, detail, reply, ...) is the mark and what the codec made of it.
2. A struct keeps its form: what is user data in it is taken out, coded together, and put where its first piece of data
   is. So ids, locations, kinds, statuses and counters can be read without the codec.
3. A struct without user data (a sleep, a step that has no outcome yet) is stored as it is, and so is every other key.
4. Opening what was sealed gives back the same bytes; opening what was not gives it as it is. A value that a newer Perdure
   sealed is refused.

| struct | what is coded together | where it is put |
|---|---|---|
| Step | `output`, `error` | `output` |
| Loop | `state`, `output` | `state` |
| Join, Race | `output` and `error` of every branch, in order | the first branch's `output` |
| Message, MailboxMessage | `body` | `body` |
| Metadata | `error`, `rollback_error` | `error`, as base64 after the mark of texts |

Rejected: coding each piece by itself. A join of 1,000 branches would grow by the overhead of 1,000, which the engine, when
it counts what fits, cannot know of; and each text would have to be base64.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias

from perdure.storage.bare import BareDecodeError, Reader, Writer
from perdure.storage.codec import CODED_MARK, CODED_TEXT_MARK, GuardedCodec, ValueKind
from perdure.storage.layout import (
    CALLS_PREFIX,
    DETAIL_PREFIX,
    ERROR_KEY,
    FAILURE_CAUSES_KEY,
    HISTORY_PREFIX,
    INPUT_KEY,
    LOOP_START_PREFIX,
    MAILBOX_PREFIX,
    METADATA_PREFIX,
    OUTPUT_KEY,
    REPLY_PREFIX,
)
from perdure.storage.own_layout import SCHEDULE_INPUT_PREFIX
from perdure.storage.schema import (
    Branch,
    Entry,
    EntryKind,
    EntryMetadata,
    JoinEntry,
    LoopEntry,
    MessageEntry,
    RaceEntry,
    StepEntry,
    decode_entry,
    decode_message,
    decode_metadata,
    encode_entry,
    encode_message,
    encode_metadata,
)

__all__ = ["CODED_KEYS", "CODED_PREFIXES", "open_value", "seal_value"]

_Fields: TypeAlias = "list[bytes | None]"
"""The user data of a struct: its fields in order, texts as UTF-8."""

_Change: TypeAlias = Callable[[bytes, GuardedCodec], bytes]
"""A stored value from a plain one, or the other way round."""

_PREFIX_BYTES: Final = 2
"""The encoding of every first part of a key."""

_LONG_PREFIX_BYTES: Final = 4
"""The encoding of the first two parts, where both are numbers."""


def seal_value(key: bytes, value: bytes, codec: GuardedCodec) -> bytes:
    """The value as it is stored under this key; the value itself where it holds no user data.

    Raises:
        ValueCodecRefusedError: The codec could not encode it.
        DecodeError: The value is not what belongs under the key.
    """
    whole = CODED_KEYS.get(key)
    if whole is not None:
        return CODED_MARK + codec.encode(value, whole)
    found = _changes_of(key)
    return value if found is None else found[0](value, codec)


def open_value(key: bytes, value: bytes, codec: GuardedCodec) -> bytes:
    """The value that was sealed; the value itself where it was not.

    Raises:
        ValueCodecError: It cannot be decoded.
        DecodeError: The value is not what belongs under the key.
    """
    whole = CODED_KEYS.get(key)
    if whole is not None:
        return _open_data(value, whole, codec)
    found = _changes_of(key)
    return value if found is None else found[1](value, codec)


def _changes_of(key: bytes) -> tuple[_Change, _Change] | None:
    return _BY_PREFIX.get(key[:_PREFIX_BYTES]) or _BY_PREFIX.get(key[:_LONG_PREFIX_BYTES])


# Data.


def _open_data(data: bytes, kind: ValueKind, codec: GuardedCodec) -> bytes:
    if data[:1] != CODED_MARK[:1]:
        return data  # from before the codec was turned on
    _check_version(data[1:2] == CODED_MARK[1:], kind, codec)
    return codec.decode(data[len(CODED_MARK) :], kind)


def _check_version(is_known: bool, kind: ValueKind, codec: GuardedCodec) -> None:
    if not is_known:
        raise codec.failure(kind, "(it is in a form that this Perdure does not know; upgrade Perdure)")


def _pack(fields: Iterable[bytes | None]) -> bytes:
    writer = Writer()
    for data in fields:
        writer.optional(writer.data, data)
    return writer.getvalue()


def _unpack(packed: bytes, count: int, kind: ValueKind, codec: GuardedCodec) -> _Fields:
    reader = Reader(packed)
    try:
        fields = [reader.optional(reader.data) for _ in range(count)]
        reader.finish()
    except BareDecodeError as error:
        raise codec.failure(kind, f"(decode() did not return what encode() was given: {error})") from error
    return fields


def _utf8(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _text(data: bytes | None, kind: ValueKind, codec: GuardedCodec) -> str | None:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise codec.failure(kind, "(decode() did not return what encode() was given)") from error


def _seal_fields(fields: _Fields, kind: ValueKind, codec: GuardedCodec) -> bytes | None:
    """The fields, coded together; `None` if there is nothing in them."""
    if all(data is None for data in fields):
        return None
    return CODED_MARK + codec.encode(_pack(fields), kind)


def _open_fields(data: bytes, count: int, kind: ValueKind, codec: GuardedCodec) -> _Fields:
    return _unpack(_open_data(data, kind, codec), count, kind, codec)


def _is_sealed(data: bytes | None) -> bool:
    return data is not None and data[:1] == CODED_MARK[:1]


# History.


def _seal_entry(value: bytes, codec: GuardedCodec) -> bytes:
    entry_id, location, kind = decode_entry(value)
    sealed = _seal_kind(kind, codec)
    return value if sealed is kind else encode_entry(Entry(entry_id, location, sealed))


def _open_entry(value: bytes, codec: GuardedCodec) -> bytes:
    entry_id, location, kind = decode_entry(value)
    opened = _open_kind(kind, codec)
    return value if opened is kind else encode_entry(Entry(entry_id, location, opened))


def _seal_kind(kind: EntryKind, codec: GuardedCodec) -> EntryKind:
    match kind:
        case StepEntry(output, error):
            data = _seal_fields([output, _utf8(error)], "step", codec)
            return kind if data is None else StepEntry(data)
        case LoopEntry(state, iteration, output):
            data = CODED_MARK + codec.encode(_pack([state, output]), "loop")
            return LoopEntry(data, iteration)
        case MessageEntry(name, body):
            return MessageEntry(name, CODED_MARK + codec.encode(body, "message"))
        case JoinEntry(branches):
            sealed = _seal_branches(branches, "join", codec)
            return kind if sealed is None else JoinEntry(sealed)
        case RaceEntry(winner, branches):
            sealed = _seal_branches(branches, "race", codec)
            return kind if sealed is None else RaceEntry(winner, sealed)
        case _:
            return kind


def _open_kind(kind: EntryKind, codec: GuardedCodec) -> EntryKind:
    match kind:
        case StepEntry(output) if output is not None and _is_sealed(output):
            output, error = _open_fields(output, 2, "step", codec)
            return StepEntry(output, _text(error, "step", codec))
        case LoopEntry(state, iteration) if _is_sealed(state):
            opened, output = _open_fields(state, 2, "loop", codec)
            if opened is None:
                raise codec.failure("loop", "(decode() did not return what encode() was given)")
            return LoopEntry(opened, iteration, output)
        case MessageEntry(name, body) if _is_sealed(body):
            return MessageEntry(name, _open_data(body, "message", codec))
        case JoinEntry(branches) if _is_sealed(_first_output(branches)):
            return JoinEntry(_open_branches(branches, "join", codec))
        case RaceEntry(winner, branches) if _is_sealed(_first_output(branches)):
            return RaceEntry(winner, _open_branches(branches, "race", codec))
        case _:
            return kind


def _first_output(branches: dict[str, Branch]) -> bytes | None:
    for branch in branches.values():
        return branch.output
    return None


def _seal_branches(branches: dict[str, Branch], kind: ValueKind, codec: GuardedCodec) -> dict[str, Branch] | None:
    data = _seal_fields(list(_branch_fields(branches)), kind, codec)
    if data is None:
        return None
    sealed = {name: Branch(branch.status) for name, branch in branches.items()}
    first = next(iter(sealed))
    sealed[first] = replace(sealed[first], output=data)
    return sealed


def _branch_fields(branches: dict[str, Branch]) -> Iterator[bytes | None]:
    for branch in branches.values():
        yield branch.output
        yield _utf8(branch.error)


def _open_branches(branches: dict[str, Branch], kind: ValueKind, codec: GuardedCodec) -> dict[str, Branch]:
    fields = _open_fields(_first_output(branches) or b"", 2 * len(branches), kind, codec)
    pairs = zip(fields[::2], fields[1::2], strict=True)
    return {
        name: Branch(branch.status, output, _text(error, kind, codec))
        for (name, branch), (output, error) in zip(branches.items(), pairs, strict=True)
    }


# What belongs to an entry, and messages that wait.


def _seal_metadata(value: bytes, codec: GuardedCodec) -> bytes:
    metadata = decode_metadata(value)
    if metadata.error is None and metadata.rollback_error is None:
        return value
    fields = _pack([_utf8(metadata.error), _utf8(metadata.rollback_error)])
    text = CODED_TEXT_MARK + b64encode(codec.encode(fields, "attempt")).decode()
    return encode_metadata(replace(metadata, error=text, rollback_error=None))


def _open_metadata(value: bytes, codec: GuardedCodec) -> bytes:
    metadata = decode_metadata(value)
    text = metadata.error
    if text is None or text[:1] != CODED_TEXT_MARK[:1]:
        return value
    _check_version(text.startswith(CODED_TEXT_MARK), "attempt", codec)
    return encode_metadata(_opened_metadata(metadata, text[len(CODED_TEXT_MARK) :], codec))


def _opened_metadata(metadata: EntryMetadata, text: str, codec: GuardedCodec) -> EntryMetadata:
    try:
        coded = b64decode(text, validate=True)
    except ValueError as error:
        raise codec.failure("attempt", f"({error})") from error
    error_data, rollback_data = _unpack(codec.decode(coded, "attempt"), 2, "attempt", codec)
    return replace(
        metadata,
        error=_text(error_data, "attempt", codec),
        rollback_error=_text(rollback_data, "attempt", codec),
    )


def _seal_message(value: bytes, codec: GuardedCodec) -> bytes:
    message = decode_message(value)
    return encode_message(replace(message, body=CODED_MARK + codec.encode(message.body, "message")))


def _open_message(value: bytes, codec: GuardedCodec) -> bytes:
    message = decode_message(value)
    if not _is_sealed(message.body):
        return value
    return encode_message(replace(message, body=_open_data(message.body, "message", codec)))


def _whole(kind: ValueKind) -> tuple[_Change, _Change]:
    return (
        lambda value, codec: CODED_MARK + codec.encode(value, kind),
        lambda value, codec: _open_data(value, kind, codec),
    )


CODED_KEYS: Final[dict[bytes, ValueKind]] = {
    INPUT_KEY: "input",
    OUTPUT_KEY: "output",
    ERROR_KEY: "error",
    FAILURE_CAUSES_KEY: "error",  # it holds a digest of the error, by which a guess at a short one could be checked
}
"""Keys whose values are user data as a whole."""

_BY_PREFIX: Final[dict[bytes, tuple[_Change, _Change]]] = {
    HISTORY_PREFIX: (_seal_entry, _open_entry),
    METADATA_PREFIX: (_seal_metadata, _open_metadata),
    MAILBOX_PREFIX: (_seal_message, _open_message),
    DETAIL_PREFIX: _whole("detail"),
    LOOP_START_PREFIX: _whole("loop_start"),
    REPLY_PREFIX: _whole("reply"),
    CALLS_PREFIX: _whole("call"),
    SCHEDULE_INPUT_PREFIX: _whole("schedule"),
}

CODED_PREFIXES: Final = frozenset(_BY_PREFIX)
"""Prefixes of the keys whose values hold user data."""
