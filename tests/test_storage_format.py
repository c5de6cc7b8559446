"""The page on the storage format is right: its example is what is stored, its schema reads it, its tables are complete.

The schema of the page is not compared with the code as text. It is run: a reader of the schema language decodes the
example and all vectors of the reference engine with it, and has to find what the code finds.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from perdure.storage import Batch, MemoryDriver, layout, own_layout
from perdure.storage.bare import Reader
from perdure.storage.keys import pack, unpack
from perdure.storage.limits import MAX_KV_BATCH_ENTRIES, MAX_KV_BATCH_PAYLOAD_BYTES
from perdure.storage.schema import (
    KIND_NAMES,
    SCHEMA_VERSION,
    Branch,
    BranchStatus,
    EntryStatus,
    SleepState,
    decode_entry,
    decode_message,
    decode_metadata,
)
from perdure.storage.sqlite_connection import PAGE_BYTES, WAL_PAGES_MAX
from perdure.storage.sqlite_image import APPLICATION_ID, FILE_FORMAT
from perdure.storage.values import decode_value
from perdure.workflow import (
    Break,
    Context,
    Continue,
    RollbackContext,
    TrioClock,
    WorkflowFailedError,
    WorkflowState,
    start_workflow,
)
from perdure.workflow.history import FORMAT_VERSION

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "storage-format.md"
VECTORS = sorted((ROOT / "tests" / "vectors").glob("*.json"))
LINE = re.compile(
    r"(key  |value|     ) ((?:[0-9a-f]{2} )*[0-9a-f]{2}) {2,}(\S.*)?|(      )((?:[0-9a-f]{2} )*[0-9a-f]{2})"
)


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def fences(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text(), re.MULTILINE | re.DOTALL)


@dataclass(slots=True)
class Explained:
    """Bytes of the page, with what is said about each piece."""

    pieces: list[tuple[bytes, str]]

    @property
    def data(self) -> bytes:
        return b"".join(piece for piece, _ in self.pieces)


def explained_pairs() -> list[tuple[Explained, Explained]]:
    """The pairs of the worked example, as the page has them."""
    pairs: list[tuple[Explained, Explained]] = []
    for line in "".join(fences("hex")).splitlines():
        match = LINE.fullmatch(line)
        assert match, f"not a line of explained bytes: {line!r}"
        label, digits, comment = (match[4] or match[1]).strip(), match[5] or match[2], match[3] or ""
        if label == "key":
            pairs.append((Explained([]), Explained([])))
            current = pairs[-1][0]
        elif label == "value":
            current = pairs[-1][1]
        current.pieces.append((bytes.fromhex(digits), comment))
    return pairs


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, bytes]]:
    """What the program of the page stores."""
    directory = tmp_path_factory.mktemp("example")
    (program,) = fences("python")
    (directory / "example.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-W", "error", "example.py"]
    done = subprocess.run(
        command, cwd=directory, env=os.environ, capture_output=True, text=True, timeout=60, check=True
    )
    return [(bytes.fromhex(key), bytes.fromhex(value)) for key, value in map(str.split, done.stdout.splitlines())]


def test_the_example_is_what_is_stored_to_the_last_byte(stored: list[tuple[bytes, bytes]]) -> None:
    """S16: the format is pinned: another byte in any of these pairs would be another format."""
    assert [(key.data.hex(), value.data.hex()) for key, value in explained_pairs()] == [
        (key.hex(), value.hex()) for key, value in stored
    ]
    assert len(stored) == 16


def test_what_is_said_about_keys_numbers_and_texts_of_the_example_is_so() -> None:
    checked = 0
    for key, value in explained_pairs():
        said = re.match(r"\((\d+), (\d+)\)", key.pieces[0][1])
        if said:
            assert unpack(key.data) == (int(said[1]), int(said[2]))
            checked += 1
        for piece, comment in (*key.pieces, *value.pieces):
            number = re.search(r"([\d,]+) ms$", comment)
            if number:
                assert int.from_bytes(piece[-8:], "little") == int(number[1].replace(",", ""))
                checked += 1
            elif len(piece) > 6 and piece.isascii() and piece.decode().isprintable():
                assert piece.decode() == comment
                checked += 1
    assert checked > 25


def test_keys_are_packed_by_the_grammar_of_the_page() -> None:
    grammar = fences("text")[0]
    codes = dict(re.findall(r"^(\w+) += ([0-9a-f]{2})\b", grammar, re.MULTILINE))
    for name, part in {"zero": 0, "positive": 255, "negative": -1, "text": "a", "nested": (0,)}.items():
        assert pack((part,))[:1].hex() == codes[name]
    assert pack((256**8 - 1,))[:1].hex() == "1c"
    assert pack((1 - 256**8,))[:1].hex() == "0c"
    assert pack((-1,)).hex(" ") in grammar
    assert pack(("\0",)) == bytes.fromhex("02 00 ff 00")


# The schema, run.


class Schema:
    """Decodes BARE by the schema of the page."""

    def __init__(self, source: str) -> None:
        self._tokens = re.findall(r"\w+|[{}<>|=]", re.sub(r"#.*", "", source))
        self._position = 0
        self.types: dict[str, Callable[[Reader], Any]] = {}
        self.fields: dict[str, list[str]] = {}
        self.members: dict[str, dict[str, int]] = {}
        while self._position < len(self._tokens):
            self._take("type")
            name = self._take()
            self.types[name] = self._type(name)

    def decode(self, name: str, data: bytes) -> Any:
        reader = Reader(data)
        assert reader.u16() == SCHEMA_VERSION
        value = self.types[name](reader)
        reader.finish()
        return value

    def _take(self, expected: str | None = None) -> str:
        token = self._tokens[self._position]
        assert expected is None or token == expected, f"{expected!r} expected, found {token!r}"
        self._position += 1
        return token

    def _is_next(self, token: str) -> bool:
        if self._tokens[self._position] != token:
            return False
        self._position += 1
        return True

    def _argument(self) -> Callable[[Reader], Any]:
        self._take("<")
        inner = self._type()
        self._take(">")
        return inner

    def _type(self, owner: str = "") -> Callable[[Reader], Any]:
        match self._take():
            case "str":
                return Reader.string
            case "data":
                return Reader.data
            case "u32":
                return Reader.u32
            case "u64":
                return Reader.u64
            case "optional":
                inner = self._argument()
                return lambda reader: inner(reader) if reader.boolean() else None
            case "list":
                inner = self._argument()
                return lambda reader: [inner(reader) for _ in range(reader.uint())]
            case "map":
                key, item = self._argument(), self._argument()
                return lambda reader: [(key(reader), item(reader)) for _ in range(reader.uint())]
            case "struct":
                return self._struct(owner)
            case "union":
                return self._union()
            case "enum":
                return self._enum(owner)
            case name:
                return lambda reader: self.types[name](reader)

    def _struct(self, owner: str) -> Callable[[Reader], Any]:
        self._take("{")
        fields: list[tuple[str, Callable[[Reader], Any]]] = []
        while not self._is_next("}"):
            fields.append((self._take(), self._type()))
        self.fields[owner] = [name for name, _ in fields]
        return lambda reader: tuple(read(reader) for _, read in fields)

    def _union(self) -> Callable[[Reader], Any]:
        self._take("{")
        alternatives: dict[int, tuple[str, Callable[[Reader], Any]]] = {}
        while not self._is_next("}"):
            name = self._tokens[self._position]
            read = self._type()
            self._take("=")
            alternatives[int(self._take())] = (name, read)
            self._is_next("|")

        def read_union(reader: Reader) -> Any:
            name, read = alternatives[reader.uint()]
            return name, read(reader)

        return read_union

    def _enum(self, owner: str) -> Callable[[Reader], Any]:
        self._take("{")
        members: dict[str, int] = {}
        while not self._is_next("}"):
            name = self._take()
            self._take("=")
            members[name] = int(self._take())
        self.members[owner] = members
        names = {number: name for name, number in members.items()}
        return lambda reader: names[reader.uint()]


@pytest.fixture(scope="module")
def schema() -> Schema:
    (source,) = fences("bare")
    return Schema(source)


def plain(value: Any) -> Any:
    """What the code decoded, in the shape in which the page's schema gives it."""
    if isinstance(value, IntEnum):
        return value.name
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, Branch):
        return (plain(value.status), value.output, value.error)
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value


def entry_by_code(data: bytes) -> Any:
    entry = decode_entry(data)
    kind = entry.kind
    segments = [("Iteration", tuple(part)) if isinstance(part, tuple) else ("u32", part) for part in entry.location]
    values = tuple(plain(getattr(kind, name)) for name in type(kind).__slots__)
    return entry.id, segments, (type(kind).__name__.removesuffix("Entry"), values)


def dumps() -> Iterator[dict[bytes, bytes]]:
    yield {key.data: value.data for key, value in explained_pairs()}
    for path in VECTORS:
        for stop in json.loads(path.read_text(encoding="utf-8")):
            yield {bytes.fromhex(key): bytes.fromhex(value) for key, value in stop["kv"]}


def test_the_schema_of_the_page_reads_every_stored_struct(schema: Schema) -> None:
    """S16: the example and all dumps of the reference engine, with the same result as the code's."""
    kinds: set[str] = set()
    for dump in dumps():
        for key, value in dump.items():
            match unpack(key)[0]:
                case 2:
                    found = schema.decode("Entry", value)
                    assert found == entry_by_code(value)
                    kinds.add(found[2][0])
                case 4:
                    assert schema.decode("Metadata", value) == plain(astuple(decode_metadata(value)))
                case 33:
                    assert schema.decode("MailboxMessage", value) == astuple(decode_message(value))
                case 3 if unpack(key) != (3, 1):
                    decode_value(value)
                case _:
                    pass
    assert kinds == {kind.__name__.removesuffix("Entry") for kind in KIND_NAMES}


def test_the_schema_names_what_the_code_names(schema: Schema) -> None:
    for enum in (SleepState, BranchStatus, EntryStatus):
        assert schema.members[enum.__name__] == {member.name: member.value for member in enum}
    for kind in KIND_NAMES:
        assert schema.fields[kind.__name__.removesuffix("Entry")] == list(kind.__slots__)


# The tables.


def keys_listed() -> set[str]:
    return {
        key for row in re.findall(r"^\| (`\(.*?) \|", text(), re.MULTILINE) for key in re.findall(r"`\((\d.*?)\)`", row)
    }


def test_every_key_that_the_layout_has_is_in_the_table() -> None:
    prefixes = {
        name: value
        for module in (layout, own_layout)
        for name, value in vars(module).items()
        if name.endswith("_PREFIX")
    }
    fields = {name: value for name, value in vars(layout).items() if name.endswith("_KEY")}
    assert len(fields) > 15
    listed = keys_listed()
    assert {", ".join(str(part) for part in unpack(key)) for key in fields.values()} <= listed
    deeper = [
        ", ".join(str(part) for part in unpack(prefix)) for prefix in prefixes.values() if len(unpack(prefix)) > 1
    ]
    assert [prefix for prefix in deeper if not any(key.startswith(f"{prefix}, ") for key in listed)] == []
    assert {str(unpack(prefix)[0]) for prefix in prefixes.values()} | {"5"} == {key.partition(",")[0] for key in listed}


class WatchedDriver(MemoryDriver):
    """Notes every pair that is ever put."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[bytes, bytes]] = []

    async def batch(self, batch: Batch) -> None:
        self.pairs += batch.puts
        await super().batch(batch)

    def batch_nowait(self, batch: Batch) -> bool:
        self.pairs += batch.puts
        return super().batch_nowait(batch)


async def everything(ctx: Context, _: object) -> None:
    """Has something of each kind that leaves a detail, fails, and is undone at the second attempt."""

    async def read(ctx: Context) -> str:
        return (await ctx.queue.next("letter")).name

    async def failing(ctx: Context) -> None:
        raise ValueError("no")

    async def fail() -> None:
        raise ValueError("no")

    async def undo(ctx: RollbackContext, output: str) -> None:
        if ctx.attempt == 1:
            raise ValueError("not yet")

    async def body(ctx: Context, count: int) -> Continue[int] | Break[None]:
        await ctx.step("do", read_nothing, rollback=undo, retry_backoff_base=0)
        return Continue(count + 1) if count == 0 else Break(None)

    await ctx.sleep("of a user:deadline", 0)
    await ctx.race("first", {"read": read})
    await ctx.rollback_checkpoint("checkpoint")
    await ctx.loop("twice", body, 0)
    await ctx.try_step("fail", fail, max_retries=0)
    await ctx.join("all", {"failing": failing})


async def read_nothing() -> str:
    return "nothing"


async def test_details_and_own_fields_that_are_stored_are_those_of_the_tables(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """S35, S36: nothing is written that the page does not have, and of details nothing is on it that is not written."""
    driver = WatchedDriver()
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(nursery, "workflow-1", everything, None, driver, clock=TrioClock())
        await handle.message("letter", None, id="letter-1")
        with pytest.raises(WorkflowFailedError):
            await handle.result()
        await handle.recover()
        with pytest.raises(WorkflowFailedError):
            await handle.result()
    fields: set[str] = set()
    keys: set[str] = set()
    for key, value in driver.pairs:
        first, *rest = unpack(key)
        if first == 35:
            fields |= decode_value(value).keys()
        if isinstance(first, int) and first >= 32:
            keys.add(f"{first}, {rest[0]}" if first == 32 else str(first))
    table = text().partition("A detail (35) is a map")[2].partition("The error of a detail")[0]
    cells = re.findall(r"^\| [^|]+ \| ([^|]+) \|", table, re.MULTILINE)
    assert fields == {field for cell in cells for field in re.findall(r"`(\w+)`", cell)}
    listed = keys_listed()
    assert {key for key in keys if key.startswith("32")} <= listed
    assert keys >= {"32, 1", "32, 4", "32, 5", "32, 10", "32, 12", "33", "34", "35", "36"}
    assert "32, 8" not in keys
    assert "32, 9" not in keys


def test_numbers_and_texts_of_the_page_are_those_of_the_code() -> None:
    page = text()
    for state in WorkflowState:
        assert f"`{state.value}`" in page
    for statement in (
        f"`application_id` | `0x{APPLICATION_ID:08x}`",
        f"`user_version` | {FILE_FORMAT} |",
        f"`page_size` | {PAGE_BYTES:,} |",
        f"`wal_autocheckpoint` | {WAL_PAGES_MAX} pages",
        f"more than {MAX_KV_BATCH_ENTRIES} changes or {MAX_KV_BATCH_PAYLOAD_BYTES // 1024} KiB",
        f"version of the keys from 32 on; {FORMAT_VERSION} |",
        f"the version of its schema ({SCHEMA_VERSION})",
        f'"version": {importlib.import_module("perdure.storage.directory").FORMAT_VERSION}',
        "CREATE TABLE kv (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    ):
        assert statement in page
