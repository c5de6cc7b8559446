"""Where everything is: the keys of one workflow's namespace.

1. This module is the only place that knows a prefix. Everything else names what it wants.
2. Prefixes 1 to 4 are the reference engine's. It never writes prefixes of 32 and above and ignores them when reading,
   so what Perdure adds lies there. 5 is reserved by the reference host and never written.
3. Order of keys is order of use: history by location, the mailbox by sequence, iterations of a loop by number, so that
   a scan of a prefix needs no sort and pruning is one range.
4. A parser accepts exactly the keys its builder makes.

Every number here is stored on disk; never change or reuse.
"""

from __future__ import annotations

from typing import Final

from perdure.storage.errors import DecodeError, EncodeError
from perdure.storage.keys import KeyDecodeError, KeyEncodeError, KeyPart, pack, pack_index, unpack
from perdure.storage.schema import U32_MAX, Location, LoopIteration, Segment

__all__ = [
    "ALARM_KEY",
    "ATTRIBUTES_KEY",
    "CODEC_KEY",
    "CALLS_PREFIX",
    "COMPLETION_SEQUENCE_KEY",
    "CREATED_AT_KEY",
    "DEADLINE_KEY",
    "DEDUP_PREFIX",
    "DETAIL_PREFIX",
    "DUTIES_KEY",
    "ERROR_KEY",
    "FAILURE_CAUSES_KEY",
    "FORMAT_VERSION_KEY",
    "HISTORY_PREFIX",
    "GENERATION_KEY",
    "IDLE_ACTIVATIONS_KEY",
    "INPUT_KEY",
    "JOINERS_KEY",
    "LOOP_START_PREFIX",
    "MAILBOX_PREFIX",
    "MAILBOX_SEQUENCE_KEY",
    "METADATA_PREFIX",
    "NAMES_PREFIX",
    "OUTPUT_KEY",
    "OWN_PREFIX",
    "PARENT_KEY",
    "PASSABLE_KEY",
    "REPLIES_PREFIX",
    "REPLY_PREFIX",
    "REQUEST_ANSWERED_PREFIX",
    "REQUEST_OPEN_PREFIX",
    "REQUEST_PREFIX",
    "SEED_KEY",
    "SENT_PREFIX",
    "STATE_KEY",
    "U64_MAX",
    "WORKFLOW_ID_KEY",
    "WORKFLOW_PREFIX",
    "WORKFLOW_TYPE_KEY",
    "NumberDecodeError",
    "NumberEncodeError",
    "answered_request_key",
    "call_key",
    "decode_u64",
    "dedup_key",
    "detail_key",
    "encode_u64",
    "entry_key",
    "key_below",
    "loop_iterations_range",
    "loop_start_key",
    "message_key",
    "metadata_key",
    "name_key",
    "open_request_key",
    "outcome_key",
    "parse_call_key",
    "parse_dedup_key",
    "parse_detail_key",
    "parse_entry_key",
    "parse_loop_start_key",
    "parse_message_key",
    "parse_metadata_key",
    "parse_name_key",
    "parse_request_key",
    "parse_sent_key",
    "reply_key",
    "sender_prefix",
    "sent_key",
]

U64_MAX: Final = 2**64 - 1
"""Largest stored number."""

# First parts of keys: stored on disk; never change or reuse.
_NAMES: Final = 1
_HISTORY: Final = 2
_WORKFLOW: Final = 3
_METADATA: Final = 4
_OWN: Final = 32
_MAILBOX: Final = 33
_DEDUP: Final = 34
_DETAIL: Final = 35
_LOOP_START: Final = 36
_REPLIES: Final = 37
_CALLS: Final = 38
_SENT: Final = 39

# Third part of a call's second key: stored on disk; never change or reuse.
_OUTCOME: Final = 1

NAMES_PREFIX: Final = pack((_NAMES,))
"""The name registry, by index; values are UTF-8."""

HISTORY_PREFIX: Final = pack((_HISTORY,))
"""History entries, by location; values are versioned BARE."""

METADATA_PREFIX: Final = pack((_METADATA,))
"""Entry metadata, by entry id; values are versioned BARE."""

WORKFLOW_PREFIX: Final = pack((_WORKFLOW,))
"""Before the workflow's own fields."""

OWN_PREFIX: Final = pack((_OWN,))
"""Before the fields that Perdure adds."""

MAILBOX_PREFIX: Final = pack((_MAILBOX,))
"""Waiting messages, by sequence; values are versioned BARE. Negative sequences are of messages that were put back first."""

DEDUP_PREFIX: Final = pack((_DEDUP,))
"""Message ids that were seen."""

DETAIL_PREFIX: Final = pack((_DETAIL,))
"""What a replay needs beyond the reference's fields, by entry id; values are CBOR maps."""

LOOP_START_PREFIX: Final = pack((_LOOP_START,))
"""Starting states of retained iterations, by loop entry id and iteration; values are CBOR."""

REPLIES_PREFIX: Final = pack((_REPLIES,))
"""Requests that were sent, and the replies to them."""

# Second and third parts of keys of requests: stored on disk; never change or reuse.
REQUEST_PREFIX: Final = pack((_REPLIES, 1))
"""Which requests were sent, by whether they were answered (0 or 1) and by id; values are u64, in the order of sending and of
answering."""
REQUEST_OPEN_PREFIX: Final = pack((_REPLIES, 1, 0))
"""Those that were not answered."""
REQUEST_ANSWERED_PREFIX: Final = pack((_REPLIES, 1, 1))
"""Those that were."""
REPLY_PREFIX: Final = pack((_REPLIES, 2))
"""Replies, by request id; values are CBOR."""

CALLS_PREFIX: Final = pack((_CALLS,))
"""Calls of other workflows that are open, or that nobody waits for any more, by entry id; values are CBOR maps."""

SENT_PREFIX: Final = pack((_SENT,))
"""What other workflows sent, by sender and message id; values are u64, the sequence that the message had."""

# Second parts of keys: stored on disk; never change or reuse.
STATE_KEY: Final = pack((_WORKFLOW, 1))
"""UTF-8 text of the workflow's state."""
OUTPUT_KEY: Final = pack((_WORKFLOW, 2))
"""CBOR of what the function returned; absent when it returned nothing."""
ERROR_KEY: Final = pack((_WORKFLOW, 3))
"""CBOR map `name, message, stack?, metadata?` of the error that ended the workflow."""
INPUT_KEY: Final = pack((_WORKFLOW, 4))
"""CBOR of the workflow's input."""

WORKFLOW_ID_KEY: Final = pack((_OWN, 1))
"""UTF-8."""
WORKFLOW_TYPE_KEY: Final = pack((_OWN, 2))
"""UTF-8."""
ALARM_KEY: Final = pack((_OWN, 3))
"""When to wake the workflow: u64, milliseconds since the epoch."""
IDLE_ACTIVATIONS_KEY: Final = pack((_OWN, 4))
"""u64: activations in a row that made no progress."""
COMPLETION_SEQUENCE_KEY: Final = pack((_OWN, 5))
"""u64: the last number given to a completed step."""
SEED_KEY: Final = pack((_OWN, 6))
"""16 bytes: what the workflow's random values derive from."""
MAILBOX_SEQUENCE_KEY: Final = pack((_OWN, 7))
"""u64: the number that the next message gets."""
ATTRIBUTES_KEY: Final = pack((_OWN, 8))
"""CBOR map."""
PARENT_KEY: Final = pack((_OWN, 9))
"""CBOR of the parent workflow's reference."""
FAILURE_CAUSES_KEY: Final = pack((_OWN, 10))
"""CBOR map: `entries`, the ids of the entries that caused the failure; `error`, 8 bytes of SHA-256 of the error's value."""
FORMAT_VERSION_KEY: Final = pack((_OWN, 11))
"""u64: the version of this layout."""
PASSABLE_KEY: Final = pack((_OWN, 12))
"""CBOR list of pairs of entry ids: the code may pass over what was recorded after the first, up to the second."""
DEADLINE_KEY: Final = pack((_OWN, 13))
"""u64: when the workflow fails unless it has ended, milliseconds since the epoch."""
CREATED_AT_KEY: Final = pack((_OWN, 17))
"""When a supervisor made the workflow: u64, milliseconds since the epoch."""
CODEC_KEY: Final = pack((_OWN, 18))
"""u64: the namespace holds values that a codec wrapped, in this version of their form; absent where none was ever written."""

DUTIES_KEY: Final = pack((_OWN, 14))
"""CBOR list of what the workflow still owes to others: `tell` its callers how it ended, `cancel` workflows that it called."""
GENERATION_KEY: Final = pack((_OWN, 15))
"""u64: how often the workflow was replayed from a step; what it sends and calls then is something new."""
JOINERS_KEY: Final = pack((_OWN, 16))
"""CBOR list of the ids of the workflows that wait for this one, beside its parent."""


class NumberEncodeError(EncodeError):
    """A number does not fit the eight bytes it is stored in."""


class NumberDecodeError(DecodeError):
    """A stored number is not eight bytes long."""


def name_key(index: int) -> bytes:
    """Key of a registered name, by its index (0 to 2**32 - 1)."""
    return NAMES_PREFIX + (pack_index(index) if 0 <= index < 65536 else pack((index,)))


def entry_key(location: Location) -> bytes:
    """Key of the history entry at a location. It is also the prefix of everything below that entry."""
    return HISTORY_PREFIX + pack(location)


def key_below(parent: bytes, index: int) -> bytes:
    """Key of the entry by the name of this index (0 to 2**32 - 1) directly below a place, whose own key is `parent`."""
    return parent + (pack_index(index) if index < 65536 else pack((index,)))


def metadata_key(entry_id: str) -> bytes:
    """Key of an entry's metadata."""
    return _text_key(METADATA_PREFIX, entry_id)


def message_key(sequence: int) -> bytes:
    """Key of a waiting message, by its place in the mailbox (-2**63 to 2**64 - 1)."""
    return MAILBOX_PREFIX + pack((sequence,))


def dedup_key(message_id: str) -> bytes:
    """Key of the record that a message id was seen."""
    return _text_key(DEDUP_PREFIX, message_id)


def open_request_key(request_id: str) -> bytes:
    """Key of the record that a request was sent and is not answered."""
    return _text_key(REQUEST_OPEN_PREFIX, request_id)


def answered_request_key(request_id: str) -> bytes:
    """Key of the record that a request was answered."""
    return _text_key(REQUEST_ANSWERED_PREFIX, request_id)


def reply_key(request_id: str) -> bytes:
    """Key of the reply to a request; CBOR."""
    return _text_key(REPLY_PREFIX, request_id)


def detail_key(entry_id: str) -> bytes:
    """Key of an entry's details."""
    return _text_key(DETAIL_PREFIX, entry_id)


def _text_key(prefix: bytes, text: str) -> bytes:
    if text.isascii() and "\0" not in text:  # as ids are: nothing to escape
        return prefix + b"\x02" + text.encode() + b"\0"
    return prefix + pack((text,))


def loop_start_key(entry_id: str, iteration: int) -> bytes:
    """Key of the state that a retained iteration (0 to 2**32 - 1) started with."""
    return LOOP_START_PREFIX + pack((entry_id, iteration))


def loop_iterations_range(loop_location: Location, from_iteration: int, to_iteration: int) -> tuple[bytes, bytes]:
    """The keys of all entries inside some iterations of a loop, and of nothing else.

    Args:
        loop_location: Where the loop's own entry is; ends in the index of the loop's name.
        from_iteration: First iteration of the range, at least 0.
        to_iteration: First iteration after the range, from `from_iteration` to 2**32.

    Returns:
        Start (inclusive) and end (exclusive) of the range, for `Driver.delete_range`.

    Raises:
        KeyEncodeError: The location is not a loop's, or the iterations are out of range.
    """
    name = loop_location[-1] if loop_location else None
    if name is None or isinstance(name, tuple):
        raise KeyEncodeError(f"{loop_location} is not where a loop is: it must end in a name index", path="location")
    if not 0 <= from_iteration <= to_iteration <= U32_MAX + 1:
        reason = f"iterations {from_iteration} to {to_iteration} are not an ascending range within 0 to 2**32"
        raise KeyEncodeError(reason, path="iteration")
    parent = entry_key(loop_location)
    return parent + pack(((name, from_iteration),)), parent + pack(((name, to_iteration),))


def call_key(entry_id: str) -> bytes:
    """Key of an open call, by the id of its entry."""
    return _text_key(CALLS_PREFIX, entry_id)


def outcome_key(entry_id: str) -> bytes:
    """Key of what came of a call, once that is known and until the call's own entry says it."""
    return CALLS_PREFIX + pack((entry_id, _OUTCOME))


def sender_prefix(sender: str) -> bytes:
    """Before everything that is remembered of one sender."""
    return SENT_PREFIX + pack((sender,))


def sent_key(sender: str, message_id: str) -> bytes:
    """Key of the record that a message of another workflow's came."""
    return SENT_PREFIX + pack((sender, message_id))


def parse_name_key(key: bytes) -> int:
    """The index in a key of the name registry.

    Raises:
        KeyDecodeError: It is another key.
    """
    return _u32(_single(key, _NAMES, "name"), key)


def parse_entry_key(key: bytes) -> Location:
    """The location in a key of history.

    Raises:
        KeyDecodeError: It is another key, or names no location.
    """
    parts = unpack(key)
    if len(parts) < 2 or parts[0] != _HISTORY:
        raise _foreign(key, "history")
    return tuple(_segment(part, key) for part in parts[1:])


def parse_metadata_key(key: bytes) -> str:
    """The entry id in a key of entry metadata.

    Raises:
        KeyDecodeError: It is another key.
    """
    return _text(_single(key, _METADATA, "metadata"), key)


def parse_message_key(key: bytes) -> int:
    """The sequence in a key of the mailbox.

    Raises:
        KeyDecodeError: It is another key.
    """
    sequence = _single(key, _MAILBOX, "mailbox")
    if not isinstance(sequence, int) or sequence < -(2**63):
        raise _foreign(key, "mailbox")
    return sequence


def parse_dedup_key(key: bytes) -> str:
    """The message id in a key of the deduplication records.

    Raises:
        KeyDecodeError: It is another key.
    """
    return _text(_single(key, _DEDUP, "deduplication"), key)


def parse_request_key(key: bytes) -> tuple[bool, str]:
    """Whether the request of a key below `REQUEST_PREFIX` was answered, and its id.

    Raises:
        KeyDecodeError: It is another key.
    """
    parts = unpack(key)
    if len(parts) != 4 or parts[:2] != (_REPLIES, 1) or parts[2] not in (0, 1):
        raise _foreign(key, "request")
    return parts[2] == 1, _text(parts[3], key)


def parse_detail_key(key: bytes) -> str:
    """The entry id in a key of details.

    Raises:
        KeyDecodeError: It is another key.
    """
    return _text(_single(key, _DETAIL, "detail"), key)


def parse_loop_start_key(key: bytes) -> tuple[str, int]:
    """The loop's entry id and the iteration in a key of starting states.

    Raises:
        KeyDecodeError: It is another key.
    """
    parts = unpack(key)
    if len(parts) != 3 or parts[0] != _LOOP_START:
        raise _foreign(key, "loop start")
    return _text(parts[1], key), _u32(parts[2], key)


def parse_call_key(key: bytes) -> tuple[str, bool]:
    """The entry id in a key of open calls, and whether it is that of what came of the call.

    Raises:
        KeyDecodeError: It is another key.
    """
    parts = unpack(key)
    if len(parts) not in (2, 3) or parts[0] != _CALLS or parts[2:] not in ((), (_OUTCOME,)):
        raise _foreign(key, "call")
    return _text(parts[1], key), len(parts) == 3


def parse_sent_key(key: bytes) -> tuple[str, str]:
    """The sender and the message id in a key of what other workflows sent.

    Raises:
        KeyDecodeError: It is another key.
    """
    parts = unpack(key)
    if len(parts) != 3 or parts[0] != _SENT:
        raise _foreign(key, "sent message")
    return _text(parts[1], key), _text(parts[2], key)


def encode_u64(value: int) -> bytes:
    """A number as stored under the keys that say u64: eight bytes, little-endian.

    Raises:
        NumberEncodeError: It is not within 0 to 2**64 - 1.
    """
    if not 0 <= value <= U64_MAX:
        raise NumberEncodeError(f"{value} is not within 0 to 2**64 - 1", type_name="u64")
    return value.to_bytes(8, "little")


def decode_u64(data: bytes) -> int:
    """The inverse of `encode_u64`.

    Raises:
        NumberDecodeError: There are not exactly eight bytes.
    """
    if len(data) != 8:
        raise NumberDecodeError(f"a stored number has 8 bytes, not {len(data)}")
    return int.from_bytes(data, "little")


def _single(key: bytes, first: int, what: str) -> KeyPart:
    parts = unpack(key)
    if len(parts) != 2 or parts[0] != first:
        raise _foreign(key, what)
    return parts[1]


def _segment(part: KeyPart, key: bytes) -> Segment:
    if isinstance(part, tuple) and len(part) == 2:
        return LoopIteration(_u32(part[0], key), _u32(part[1], key))
    return _u32(part, key)


def _u32(part: KeyPart, key: bytes) -> int:
    if isinstance(part, int) and 0 <= part <= U32_MAX:
        return part
    raise KeyDecodeError(f"key {key.hex()} holds {part!r} where a number within 0 to 2**32 - 1 belongs")


def _text(part: KeyPart, key: bytes) -> str:
    if isinstance(part, str):
        return part
    raise KeyDecodeError(f"key {key.hex()} holds {part!r} where text belongs")


def _foreign(key: bytes, what: str) -> KeyDecodeError:
    return KeyDecodeError(f"{key.hex()} is not a {what} key")
