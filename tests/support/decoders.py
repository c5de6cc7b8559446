"""Every function of the packages that makes something of stored bytes, and how it is fuzzed.

1. `decoders_of_packages` finds them by name in the source; one that is not in `DECODERS` or `THROUGH` makes
   `tests/property/test_fuzz_decoders.py` red, so a new decoder cannot be forgotten.
2. A decoder gives a value or raises what its docstring says, `DecodeError` nearly always; nothing else, whatever the bytes.
3. What it gives can be encoded, and decoded from that, and is the same then.

Rejected: a mark at each decoder (a decorator, say). It would say that somebody thought of it, and not that it is fuzzed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from perdure.actors.schedule_record import Run, RunStatus, decode_cursor, decode_definition, decode_run
from perdure.storage import ValueCodecError, decode_value, encode_value, layout, own_layout
from perdure.storage.attributes import decode_attributes, encode_attributes
from perdure.storage.codec import GuardedCodec, ValueContext
from perdure.storage.coded_values import open_value, seal_value
from perdure.storage.errors import DecodeError
from perdure.storage.keys import pack, unpack
from perdure.storage.naming import parse_file_name
from perdure.storage.rebuild import parent_id_of
from perdure.storage.schema import (
    MessageEntry,
    decode_entry,
    decode_message,
    decode_metadata,
    encode_entry,
    encode_message,
    encode_metadata,
)
from perdure.testing import HistoryFileError, RecordedHistory
from perdure.testing.asked import _parse_only  # pyright: ignore[reportPrivateUsage]
from perdure.testing.history_files import decode_history, encode_history
from perdure.workflow.calls import ChildOutcome, OpenCall
from perdure.workflow.details import decode_detail
from perdure.workflow.errors import InvalidArgumentError, StoredValueError
from perdure.workflow.failures import info_from_map, info_from_text, info_to_map, kind_from_text
from perdure.workflow.reads import decode_count, decode_read
from perdure.workflow.typed import decode_input, decode_output

__all__ = ["DECODERS", "HISTORIES", "THROUGH", "Decoder", "decoders_of_packages"]

ROOT: Final = Path(__file__).resolve().parents[2]
_NAME: Final = re.compile(r"_?(decode|parse|unpack)(_|$)|_?\w+_from_(map|text)$")


@dataclass(frozen=True, slots=True)
class Decoder:
    """How one of them is fuzzed.

    Attributes:
        decode: Takes bytes.
        kind: What sound bytes are made from: "key" or "value" of a namespace, or "own", "name", "only", "history".
        encode: Gives the stored form of what was decoded, if there is such a function.
        refusals: What it may raise.
    """

    decode: Callable[[bytes], Any]
    kind: str = "value"
    encode: Callable[[Any], bytes] | None = None
    refusals: tuple[type[Exception], ...] = (DecodeError,)


class _Reverse:
    """A codec that is easily undone, and never content with what it did not make."""

    overhead_bytes: Final = 1

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        return b"R" + data[::-1]

    def decode(self, data: bytes, context: ValueContext) -> bytes:
        if data[:1] != b"R":
            raise ValueError("this was not made here")
        return data[:0:-1]


@dataclass(frozen=True, slots=True)
class _Order:
    sku: str
    count: int
    notes: list[str]


async def _typed(ctx: Any, input: _Order) -> _Order:
    return input


def _read(data: bytes) -> Any:
    return decode_read(MessageEntry("go", data), "go:0")


def _opened(prefix: bytes) -> Callable[[bytes], bytes]:
    codec = GuardedCodec(_Reverse(), "workflow-1")
    return lambda data: open_value(prefix, data, codec)


def _history(data: bytes) -> dict[str, Any]:
    found = asdict(decode_history(data, "a.json"))
    return found | {"pairs": dict(sorted(found["pairs"].items()))}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


CODED: Final = (
    layout.INPUT_KEY,
    layout.HISTORY_PREFIX + b"\x15\x01",
    layout.METADATA_PREFIX + b"\x02a\x00",
    layout.MAILBOX_PREFIX + b"\x15\x01",
    layout.DETAIL_PREFIX + b"\x02a\x00",
)
"""A key of each kind of value that is coded."""

DECODERS: Final[dict[str, Decoder]] = {
    "storage.keys.unpack": Decoder(unpack, "key", pack),
    "storage.layout.decode_u64": Decoder(layout.decode_u64, "value", layout.encode_u64),
    "storage.layout.parse_name_key": Decoder(layout.parse_name_key, "key", layout.name_key),
    "storage.layout.parse_entry_key": Decoder(layout.parse_entry_key, "key", layout.entry_key),
    "storage.layout.parse_metadata_key": Decoder(layout.parse_metadata_key, "key", layout.metadata_key),
    "storage.layout.parse_message_key": Decoder(layout.parse_message_key, "key", layout.message_key),
    "storage.layout.parse_dedup_key": Decoder(layout.parse_dedup_key, "key", layout.dedup_key),
    "storage.layout.parse_request_key": Decoder(layout.parse_request_key, "key"),
    "storage.layout.parse_detail_key": Decoder(layout.parse_detail_key, "key", layout.detail_key),
    "storage.layout.parse_loop_start_key": Decoder(
        layout.parse_loop_start_key, "key", lambda found: layout.loop_start_key(*found)
    ),
    "storage.layout.parse_call_key": Decoder(
        layout.parse_call_key,
        "key",
        lambda found: layout.outcome_key(found[0]) if found[1] else layout.call_key(found[0]),
    ),
    "storage.layout.parse_sent_key": Decoder(layout.parse_sent_key, "key", lambda found: layout.sent_key(*found)),
    "storage.own_layout.parse_schedule_key": Decoder(own_layout.parse_schedule_key, "own key"),
    "storage.own_layout.parse_schedule_run_key": Decoder(
        own_layout.parse_schedule_run_key, "own key", lambda found: own_layout.schedule_run_key(*found)
    ),
    "storage.own_layout.parse_rate_key": Decoder(
        own_layout.parse_rate_key, "own key", lambda found: own_layout.rate_key(*found)
    ),
    "storage.naming.parse_file_name": Decoder(lambda data: parse_file_name(_text(data)), "name"),
    "storage.attributes.decode_attributes": Decoder(decode_attributes, "value", encode_attributes),
    "storage.schema.decode_entry": Decoder(decode_entry, "value", encode_entry),
    "storage.schema.decode_metadata": Decoder(decode_metadata, "value", encode_metadata),
    "storage.schema.decode_message": Decoder(decode_message, "value", encode_message),
    "storage.value_decoder.decode_value": Decoder(decode_value, "value", encode_value),
    "storage.rebuild.parent_id_of": Decoder(parent_id_of),
    **{
        f"storage.coded_values.open_value {key[:2].hex()}": Decoder(
            _opened(key), "sealed", refusals=(DecodeError, ValueCodecError)
        )
        for key in CODED
    },
    "workflow.details.decode_detail": Decoder(lambda data: decode_detail(data, "e"), "value", encode_value),
    "workflow.reads.decode_read": Decoder(_read),
    "workflow.reads.decode_count": Decoder(lambda data: decode_count(MessageEntry("go:count", data), "go:count")),
    "workflow.calls.ChildOutcome.decode": Decoder(ChildOutcome.decode, "value", ChildOutcome.encode),
    "workflow.calls.OpenCall.decode": Decoder(lambda data: OpenCall.decode("e", data), "value", OpenCall.encode),
    "workflow.failures.info_from_map": Decoder(
        lambda data: info_from_map(decode_value(data)), "value", lambda info: encode_value(info_to_map(info))
    ),
    "workflow.failures.info_from_text": Decoder(lambda data: info_from_text(_text(data)), "name"),
    "workflow.failures.kind_from_text": Decoder(lambda data: kind_from_text(_text(data)), "name"),
    "workflow.typed.decode_input": Decoder(
        lambda data: decode_input(_typed, data), refusals=(DecodeError, StoredValueError)
    ),
    "workflow.typed.decode_output": Decoder(
        lambda data: decode_output(_typed, data), refusals=(DecodeError, StoredValueError)
    ),
    "actors.schedule_record.decode_definition": Decoder(decode_definition, "own"),
    "actors.schedule_record.decode_cursor": Decoder(decode_cursor, "own"),
    "actors.schedule_record.decode_run": Decoder(
        decode_run, "own", lambda run: encode_value({"status": run.status.value, "workflow_id": run.workflow_id})
    ),
    "testing.asked._parse_only": Decoder(
        lambda data: _parse_only(_text(data)), "only", refusals=(InvalidArgumentError,)
    ),
    "testing.history_files.decode_history": Decoder(
        _history, "history", lambda fields: encode_history(RecordedHistory(**fields)), refusals=(HistoryFileError,)
    ),
}
"""By where they are. Those with a blank in it are one function for several kinds of value."""

SAMPLES: Final = (
    encode_value({"sku": "A-7", "count": 3, "notes": ["fragile"]}),
    encode_value({"status": Run(RunStatus.QUEUED, "w").status.value, "workflow_id": "w"}),
    ChildOutcome("completed", b"\x01").encode(),
    OpenCall("e", "child-1", "cancel", is_given=True).encode(),
)
"""Sound values that namespaces need not hold."""

HISTORIES: Final = tuple(
    encode_history(RecordedHistory("w", "order", state, 1_700_000_000_000, waits, ("step 'charge': completed",), pairs))
    for state, waits, pairs in (
        ("sleeping", ("a message, in the read 'wait'",), {layout.STATE_KEY: b"sleeping", layout.INPUT_KEY: b"\x05"}),
        ("completed", (), {layout.STATE_KEY: b"completed"}),
    )
)
"""Sound files of recorded histories."""

SEALED: Final = tuple(
    seal_value(key, value, GuardedCodec(_Reverse(), "workflow-1"))
    for key, value in (
        (layout.INPUT_KEY, encode_value([1, 2])),
        (layout.DETAIL_PREFIX + b"\x02a\x00", encode_value({"kind": "exhausted"})),
    )
)

THROUGH: Final[dict[str, str]] = {
    "storage.keys._unpack_escaped": "storage.keys.unpack",
    "storage.keys._unpack_int": "storage.keys.unpack",
    "storage.keys._unpack_text": "storage.keys.unpack",
    "storage.coded_values._unpack": "storage.coded_values.open_value 1502",
    "storage.codec.GuardedCodec.decode": "storage.coded_values.open_value 1502",
    "storage.codec.ValueCodec.decode": "storage.coded_values.open_value 1502",
    "storage.value_decoder._decode": "storage.value_decoder.decode_value",
    "workflow.reads._decode_fields": "workflow.reads.decode_read",
    "workflow.typed.Converter.decode": "workflow.typed.decode_input",
    "workflow.typed.decode": "workflow.typed.decode_input",
    "workflow.step._decode": "workflow.typed.decode_output",
    "workflow.loop._decode_state": "workflow.typed.decode_output",
    "workflow.children._decode": "workflow.typed.decode_output",
}
"""Functions that do nothing but what another one does, or a part of it; and that one."""


def decoders_of_packages() -> Iterator[str]:
    """Every function and method that is named like a decoder, as `layer.module.name`."""
    for layer in ("storage", "workflow", "actors", "testing"):
        for path in sorted((ROOT / layer / "perdure" / layer).rglob("*.py")):
            module = ".".join((layer, *path.relative_to(ROOT / layer / "perdure" / layer).with_suffix("").parts))
            yield from (f"{module}.{name}" for name in _functions(ast.parse(path.read_text(encoding="utf-8"))))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _NAME.match(node.name):
            yield prefix + node.name
