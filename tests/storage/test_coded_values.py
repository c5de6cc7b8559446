"""What is coded in stored values, what stays legible, and that opening gives back what was sealed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import entries, messages, metadata, values
from value_codecs import Compressing, SealedCodec, XorCodec

from perdure.storage import (
    ValueCodec,
    ValueCodecError,
    ValueCodecRefusedError,
    ValueContext,
    encode_value,
    layout,
    own_layout,
)
from perdure.storage.codec import CODED_BYTES_MAX, CODED_MARK, CODED_TEXT_MARK, GuardedCodec
from perdure.storage.coded_values import CODED_KEYS, CODED_PREFIXES, open_value, seal_value
from perdure.storage.schema import (
    Branch,
    BranchStatus,
    Entry,
    EntryMetadata,
    EntryStatus,
    JoinEntry,
    LoopEntry,
    MailboxMessage,
    MessageEntry,
    RaceEntry,
    SleepEntry,
    StepEntry,
    decode_entry,
    decode_message,
    decode_metadata,
    encode_entry,
    encode_message,
    encode_metadata,
)

SECRET = "the secret"
DATA = encode_value({"told": SECRET})
CODECS = [XorCodec, SealedCodec, Compressing]

LEGIBLE = {
    layout.STATE_KEY,
    layout.WORKFLOW_ID_KEY,
    layout.WORKFLOW_TYPE_KEY,
    layout.ALARM_KEY,
    layout.IDLE_ACTIVATIONS_KEY,
    layout.COMPLETION_SEQUENCE_KEY,
    layout.SEED_KEY,
    layout.MAILBOX_SEQUENCE_KEY,
    layout.ATTRIBUTES_KEY,
    layout.PARENT_KEY,
    layout.FORMAT_VERSION_KEY,
    layout.PASSABLE_KEY,
    layout.DEADLINE_KEY,
    layout.DUTIES_KEY,
    layout.GENERATION_KEY,
    layout.JOINERS_KEY,
    layout.CREATED_AT_KEY,
    layout.CODEC_KEY,
}
LEGIBLE_PREFIXES = {
    layout.NAMES_PREFIX,
    layout.DEDUP_PREFIX,
    layout.SENT_PREFIX,
    layout.REQUEST_OPEN_PREFIX,
    layout.REQUEST_ANSWERED_PREFIX,
    own_layout.SCHEDULES_PREFIX,
    own_layout.SCHEDULE_DEFINITION_PREFIX,
    own_layout.SCHEDULE_CURSOR_PREFIX,
    own_layout.SCHEDULE_RUN_PREFIX,
    own_layout.RATE_PREFIX,
}
GROUPS = {layout.WORKFLOW_PREFIX, layout.OWN_PREFIX, layout.REPLIES_PREFIX, layout.REQUEST_PREFIX}


def guarded(codec: ValueCodec | None = None, workflow_id: str = "w") -> GuardedCodec:
    return GuardedCodec(codec or SealedCodec(), workflow_id)


def entry_of(kind: Any) -> tuple[bytes, bytes]:
    return layout.entry_key((0,)), encode_entry(Entry("id", (0,), kind))


def metadata_of(**fields: Any) -> tuple[bytes, bytes]:
    return layout.metadata_key("id"), encode_metadata(EntryMetadata(EntryStatus.FAILED, attempts=3, **fields))


HOLDERS: dict[str, tuple[bytes, bytes]] = {
    "input": (layout.INPUT_KEY, DATA),
    "output": (layout.OUTPUT_KEY, DATA),
    "error": (layout.ERROR_KEY, DATA),
    "causes": (layout.FAILURE_CAUSES_KEY, DATA),
    "step": entry_of(StepEntry(DATA)),
    "step's error": entry_of(StepEntry(None, f"ValueError: {SECRET}")),
    "loop's state": entry_of(LoopEntry(DATA, 7)),
    "loop's output": entry_of(LoopEntry(b"\xf7", 7, DATA)),
    "message read": entry_of(MessageEntry("name", DATA)),
    "join": entry_of(JoinEntry({"a": Branch(), "b": Branch(BranchStatus.COMPLETED, DATA)})),
    "race": entry_of(RaceEntry("a", {"a": Branch(BranchStatus.FAILED, None, f"ValueError: {SECRET}"), "b": Branch()})),
    "attempt": metadata_of(error=f"ValueError: {SECRET}"),
    "rollback": metadata_of(rollback_error=f"ValueError: {SECRET}"),
    "detail": (layout.detail_key("id"), DATA),
    "loop start": (layout.loop_start_key("id", 3), DATA),
    "reply": (layout.reply_key("r-1"), DATA),
    "schedule": (own_layout.schedule_input_key("daily"), DATA),
    "waiting message": (layout.message_key(5), encode_message(MailboxMessage("m-1", "name", DATA, 9))),
}


@pytest.mark.parametrize("what", HOLDERS)
@pytest.mark.parametrize("codec", CODECS)
def test_user_data_is_not_in_what_is_stored_and_comes_back_to_the_byte(what: str, codec: type[ValueCodec]) -> None:
    key, value = HOLDERS[what]
    sealed = seal_value(key, value, guarded(codec()))
    assert SECRET.encode() in value
    assert SECRET.encode() not in sealed
    assert open_value(key, sealed, guarded(codec())) == value


@pytest.mark.parametrize("what", HOLDERS)
def test_what_was_stored_before_there_was_a_codec_is_read_as_it_is(what: str) -> None:
    key, value = HOLDERS[what]
    assert open_value(key, value, guarded()) == value


@pytest.mark.parametrize("what", HOLDERS)
@pytest.mark.parametrize("codec", [XorCodec, SealedCodec])
def test_another_key_or_another_workflow_is_an_error_that_names_the_workflow(what: str, codec: type[XorCodec]) -> None:
    """Also where the codec itself does not notice: the checksum does."""
    key, value = HOLDERS[what]
    sealed = seal_value(key, value, guarded(codec(b"key")))
    with pytest.raises(ValueCodecError, match="workflow 'w' cannot be decoded") as caught:
        open_value(key, sealed, guarded(codec(b"another")))
    assert caught.value.workflow_id == "w"
    assert caught.value.kind is not None
    with pytest.raises(ValueCodecError, match="workflow 'v' cannot be decoded"):
        open_value(key, sealed, guarded(codec(b"key"), "v"))


@pytest.mark.parametrize("what", HOLDERS)
def test_a_form_that_a_newer_perdure_wrote_is_refused(what: str) -> None:
    key, value = HOLDERS[what]
    sealed = seal_value(key, value, guarded())
    newer = sealed.replace(CODED_MARK, b"\xff\x02").replace(CODED_TEXT_MARK.encode(), b"\x002:")
    assert newer != sealed
    with pytest.raises(ValueCodecError, match="upgrade Perdure"):
        open_value(key, newer, guarded())


def test_ids_places_names_kinds_statuses_and_counters_stay_legible() -> None:
    codec = guarded()
    key, value = HOLDERS["join"]
    join = decode_entry(seal_value(key, value, codec))
    assert (join.id, join.location) == ("id", (0,))
    assert isinstance(join.kind, JoinEntry)
    assert {name: branch.status for name, branch in join.kind.branches.items()} == {
        "a": BranchStatus.PENDING,
        "b": BranchStatus.COMPLETED,
    }
    race = decode_entry(seal_value(*HOLDERS["race"], codec)).kind
    assert isinstance(race, RaceEntry)
    assert race.winner == "a"
    loop = decode_entry(seal_value(*HOLDERS["loop's state"], codec)).kind
    assert isinstance(loop, LoopEntry)
    assert loop.iteration == 7
    read = decode_entry(seal_value(*HOLDERS["message read"], codec)).kind
    assert isinstance(read, MessageEntry)
    assert read.name == "name"
    attempt = decode_metadata(seal_value(*HOLDERS["attempt"], codec))
    assert (attempt.status, attempt.attempts) == (EntryStatus.FAILED, 3)
    message = decode_message(seal_value(*HOLDERS["waiting message"], codec))
    assert (message.id, message.name, message.sent_at_ms) == ("m-1", "name", 9)


def test_what_holds_no_user_data_is_stored_as_it_is() -> None:
    codec = guarded()
    plain = [
        entry_of(StepEntry()),
        entry_of(SleepEntry(7)),
        entry_of(JoinEntry({"a": Branch(), "b": Branch(BranchStatus.RUNNING)})),
        metadata_of(),
        (layout.STATE_KEY, b"running"),
        (layout.name_key(0), b"name"),
        (layout.ATTRIBUTES_KEY, DATA),
        (b"any", DATA),
    ]
    assert [seal_value(key, value, codec) for key, value in plain] == [value for _, value in plain]


def test_every_key_of_the_layout_is_known_to_be_coded_or_legible() -> None:
    """A new kind of value has to be put on one of the two lists: forgotten, it would be stored as plain text."""
    named = {name: value for name, value in vars(layout).items() if name.endswith(("_KEY", "_PREFIX"))}
    keys = {value for name, value in named.items() if name.endswith("_KEY")}
    own = {value for name, value in vars(own_layout).items() if name.endswith("_PREFIX")}
    prefixes = {value for name, value in named.items() if name.endswith("_PREFIX")} - GROUPS | own
    assert keys == LEGIBLE | set(CODED_KEYS)
    assert prefixes == LEGIBLE_PREFIXES | CODED_PREFIXES
    assert not (LEGIBLE & set(CODED_KEYS))
    assert not (LEGIBLE_PREFIXES & CODED_PREFIXES)


@given(st.one_of(entries, metadata, messages), st.sampled_from([XorCodec, SealedCodec, Compressing]))
def test_every_struct_comes_back_to_the_byte_and_grows_by_no_more_than_is_stated(
    struct: Any, codec: type[ValueCodec]
) -> None:
    match struct:
        case Entry():
            key, value = layout.entry_key(struct.location or (0,)), encode_entry(struct)
        case EntryMetadata():
            key, value = layout.metadata_key("id"), encode_metadata(struct)
        case _:
            key, value = layout.message_key(0), encode_message(struct)
    sealed = seal_value(key, value, guarded(codec()))
    assert open_value(key, sealed, guarded(codec())) == value
    room = codec().overhead_bytes + CODED_BYTES_MAX
    if isinstance(struct, Entry) and isinstance(struct.kind, JoinEntry | RaceEntry):
        room += 2 * len(struct.kind.branches)
    if isinstance(struct, EntryMetadata):
        room += len(value)  # base64; its texts are bounded, and far from the limit
    assert len(sealed) <= len(value) + room


@given(values)
def test_no_plain_value_begins_as_a_coded_one(value: object) -> None:
    assert encode_value(value)[:1] != CODED_MARK[:1]


class Broken:
    """A codec that does not keep to the contract."""

    def __init__(self, encoded: Any = b"", decoded: Any = b"", overhead_bytes: Any = 0) -> None:
        self._encoded = encoded
        self._decoded = decoded
        self.overhead_bytes = overhead_bytes

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        return self._give(self._encoded)

    def decode(self, data: bytes, context: ValueContext) -> bytes:
        return self._give(self._decoded)

    def _give(self, given: Any) -> Any:
        if isinstance(given, Exception):
            raise given
        return given


@pytest.mark.parametrize(
    ("encoded", "said"),
    [
        (RuntimeError("no key"), "could not encode the input of workflow 'w' .RuntimeError: no key"),
        ("text", "returned a str"),
        (bytes(1000), "state a larger overhead_bytes"),
    ],
)
def test_a_codec_that_cannot_encode_refuses_and_says_why(encoded: Any, said: str) -> None:
    with pytest.raises(ValueCodecRefusedError, match=said):
        seal_value(layout.INPUT_KEY, DATA, guarded(Broken(encoded)))


@pytest.mark.parametrize("what", HOLDERS)
@pytest.mark.parametrize("decoded", [RuntimeError("no key"), "text", b"", b"\0\0\0\0", b"noise and more noise"])
def test_whatever_else_a_codec_gives_than_it_was_given_is_an_error(what: str, decoded: Any) -> None:
    key, value = HOLDERS[what]
    sealed = seal_value(key, value, guarded())
    with pytest.raises(ValueCodecError, match="cannot be decoded"):
        open_value(key, sealed, guarded(Broken(b"", decoded)))


@pytest.mark.parametrize("what", HOLDERS)
def test_a_value_with_one_damaged_bit_is_an_error(what: str) -> None:
    key, value = HOLDERS[what]
    sealed = seal_value(key, value, guarded())
    is_text = CODED_TEXT_MARK.encode() in sealed
    start = sealed.index(CODED_TEXT_MARK.encode()) + 3 if is_text else sealed.index(CODED_MARK) + 2
    for offset in range(start, start + 20):
        damaged = sealed[:offset] + bytes([sealed[offset] ^ 1]) + sealed[offset + 1 :]
        with pytest.raises(ValueCodecError):
            open_value(key, damaged, guarded())


@pytest.mark.parametrize("codec", [None, SealedCodec, object(), "codec"])
def test_what_is_no_codec_is_refused_at_once(codec: Any) -> None:
    with pytest.raises(TypeError, match="a codec is an object with encode"):
        GuardedCodec(codec, "w")


@pytest.mark.parametrize("overhead", [-1, 1.5, None, True])
def test_an_overhead_that_is_no_number_of_bytes_is_refused_at_once(overhead: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number of 0 or more"):
        GuardedCodec(Broken(overhead_bytes=overhead), "w")
