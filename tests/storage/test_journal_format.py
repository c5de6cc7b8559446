"""The bytes of the journal: whatever is left of a segment is read as a prefix of what was written, and as nothing else."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.storage import journal_format
from perdure.storage.driver import AlarmChange, Batch
from perdure.storage.errors import CorruptStoreError, FormatVersionError
from perdure.storage.journal_format import (
    HEADER_BYTES,
    SALT_BYTES,
    Born,
    Changed,
    Filed,
    Record,
    batch_record,
    born_record,
    filed_record,
    read_segment,
    seed_of,
    segment_header,
)
from perdure.storage.layout import ALARM_KEY, encode_u64
from perdure.storage.limits import alarm_value
from perdure.storage.memory import MemoryDriver

PATH = "journal/00000001.log"

_salts = st.binary(min_size=SALT_BYTES, max_size=SALT_BYTES)
_numbers = st.integers(0, 2**32 - 1)
_keys = st.binary(max_size=3).map(lambda key: key.translate(bytes([0, 1, 0xFE, 0xFF] * 64))) | st.just(ALARM_KEY)
_values = st.binary(max_size=40)
_pairs = st.dictionaries(_keys, _values, max_size=4).map(lambda pairs: list(pairs.items()))
_alarms = st.none() | st.builds(AlarmChange, st.just("w"), st.none() | st.integers(0, 2**64 - 1))
_batches = st.builds(
    Batch,
    puts=_pairs,
    deletes=st.lists(_keys, max_size=3),
    delete_prefixes=st.lists(_keys, max_size=3),
    delete_ranges=st.lists(st.tuples(_keys, _keys), max_size=3),
    alarm=_alarms,
)
_born = st.builds(Born, _numbers, st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
_records = st.one_of(_born, st.builds(Changed, _numbers, _batches), st.builds(Filed, _numbers))


def written(seed: int, record: Record) -> bytes:
    match record:
        case Born(number, file):
            return born_record(seed, number, file)
        case Changed(number, batch):
            return batch_record(seed, number, batch)
        case Filed(number):
            return filed_record(seed, number)


def segment(salt: bytes, records: list[Record]) -> bytes:
    seed = seed_of(salt)
    return segment_header(salt) + b"".join(written(seed, record) for record in records)


def as_read(record: Record) -> Record:
    """What a record is read back as: an alarm as the change of its key."""
    if not isinstance(record, Changed) or record.batch.alarm is None:
        return record
    batch, alarm = record.batch, alarm_value(record.batch.alarm)
    deletes, puts = batch.deletes.copy(), batch.puts.copy()
    if alarm is None:
        deletes.append(ALARM_KEY)
        puts = [(key, value) for key, value in puts if key != ALARM_KEY]
    else:
        puts.append((ALARM_KEY, alarm))
    return Changed(record.number, Batch(puts, deletes, batch.delete_prefixes, batch.delete_ranges))


def read(data: bytes) -> list[Record]:
    return list(read_segment(data, PATH))


@given(salt=_salts, records=st.lists(_records, max_size=8), zeros=st.integers(0, 100))
def test_records_are_read_back_as_they_were_written(salt, records, zeros):
    """Also when the segment, which is as long as ever, has room left."""
    assert read(segment(salt, records) + bytes(zeros)) == [as_read(record) for record in records]


@given(salt=_salts, records=st.lists(_records, max_size=5), data=st.data())
def test_cut_at_any_byte_those_records_are_read_that_are_whole(salt, records, data):
    """Whether the file ends there, or zeros follow, as where a page did not reach the disk."""
    seed = seed_of(salt)
    whole = segment(salt, records)
    cut = data.draw(st.integers(HEADER_BYTES, len(whole)))
    end, expected = HEADER_BYTES, list[Record]()
    for record in records:
        end += len(written(seed, record))
        if end <= cut:
            expected.append(as_read(record))
    assert read(whole[:cut]) == expected
    zeroed = read(whole[:cut].ljust(len(whole), b"\0"))
    assert zeroed[: len(expected)] == expected
    assert len(zeroed) <= len(expected) + 1, "what ended in zeros anyway"
    assert zeroed == [as_read(record) for record in records[: len(zeroed)]]


@given(salt=_salts, records=st.lists(_records, min_size=1, max_size=5), data=st.data())
def test_with_any_byte_changed_what_comes_before_it_is_read_and_nothing_else(salt, records, data):
    """Or the header is damaged, which no crash does, and that is said."""
    seed = seed_of(salt)
    damaged = bytearray(segment(salt, records) + bytes(20))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    if at < HEADER_BYTES:
        with pytest.raises(CorruptStoreError, match="damaged") as caught:
            read(bytes(damaged))
        assert caught.value.path == PATH
        return
    end, expected = HEADER_BYTES, list[Record]()
    for record in records:
        end += len(written(seed, record))
        if end > at:
            break
        expected.append(as_read(record))
    assert read(bytes(damaged)) == expected


@given(salt=_salts, records=st.lists(_records, max_size=3), garbage=st.binary(max_size=60), other=_salts)
def test_what_lay_on_the_disk_before_is_not_taken_for_a_record(salt, records, garbage, other):
    """Be it of an older segment, which had another salt, or behind the first place where there is no record."""
    whole = segment(salt, records)
    expected = [as_read(record) for record in records]
    seed = seed_of(salt)
    stale = Changed(1, Batch(puts=[(b"key", garbage)]))
    if seed_of(other) != seed:
        assert read(whole + written(seed_of(other), stale)) == expected
    assert read(whole + bytes(8) + written(seed, stale)) == expected
    assert read(whole + b"\xff\xff\xff\x7f" + garbage) == expected


@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_record_too_short_to_say_what_it_is_ends_the_reading(length):
    """Even with a sum that fits: zeros would be one, for a salt whose own sum is 0."""
    salt = bytes(SALT_BYTES)
    content = bytes(length)
    frame = length.to_bytes(4, "little") + crc32(content, seed_of(salt)).to_bytes(4, "little")
    assert read(segment(salt, [Filed(1)]) + frame + content + filed_record(seed_of(salt), 2)) == [Filed(1)]


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1])
def test_a_segment_that_ends_within_its_header_is_damaged(size):
    """A segment has its name only once all of it is on the disk."""
    with pytest.raises(CorruptStoreError, match="restore it, or remove it"):
        read(segment(bytes(range(SALT_BYTES)), [Filed(1)])[:size])


def test_a_newer_version_is_refused_with_both_numbers(monkeypatch):
    salt = bytes(range(SALT_BYTES))
    with monkeypatch.context() as newer:
        newer.setattr(journal_format, "_VERSION", 2)
        data = segment(salt, [Filed(1)])
    with pytest.raises(FormatVersionError, match="upgrade") as caught:
        read(data)
    assert (caught.value.found, caught.value.supported, caught.value.path) == (2, 1, PATH)


@pytest.mark.parametrize("kind", [0, 4, 255])
def test_a_record_of_a_kind_that_is_not_known_is_refused(kind):
    """It was written by a newer Perdure, and what it means for the workflow is not known."""
    salt = bytes(range(SALT_BYTES))
    record = journal_format._framed(seed_of(salt), bytes([kind]) + bytes(4))
    with pytest.raises(FormatVersionError, match="upgrade") as caught:
        read(segment(salt, [Born(0, "file")]) + record)
    assert (caught.value.found, caught.value.path) == (kind, PATH)


@given(before=_pairs, batch=_batches)
def test_what_is_read_back_does_to_a_namespace_what_the_batch_did(before, batch):
    """The alarm included, also when its key is among what the batch puts or removes."""
    (record,) = read(segment(bytes(SALT_BYTES), [Changed(1, batch)]))
    assert isinstance(record, Changed)
    assert record.batch.alarm is None
    direct, replayed = MemoryDriver(dict(before)), MemoryDriver(dict(before))
    direct.batch_nowait(batch)
    replayed.batch_nowait(record.batch)
    assert replayed.data == direct.data


@pytest.mark.parametrize("wake_at_ms", [None, 0, 2**64 - 1])
def test_an_alarm_is_a_change_of_its_key(wake_at_ms):
    batch = Batch(puts=[(ALARM_KEY, b"from before"), (b"key", b"1")], alarm=AlarmChange("w", wake_at_ms))
    (record,) = read(segment(bytes(SALT_BYTES), [Changed(1, batch)]))
    assert isinstance(record, Changed)
    if wake_at_ms is None:
        assert record.batch == Batch(puts=[(b"key", b"1")], deletes=[ALARM_KEY])
    else:
        assert record.batch.puts[-1] == (ALARM_KEY, encode_u64(wake_at_ms))
        assert not record.batch.deletes


def test_the_bytes_of_a_segment_stay_as_they_are():
    """They are stored on disk: a header and one record of each kind."""
    seed = seed_of(salt := bytes(range(SALT_BYTES)))
    batch = Batch([(b"k", b"value")], deletes=[b"d"], delete_prefixes=[b""], delete_ranges=[(b"a", b"bb")])
    assert [segment_header(salt).hex(), born_record(seed, 1, "w.1.sqlite").hex()] == [
        "504455524a524e4c0100" + "000102030405060708090a0b0c0d0e0f" + "2bfb3493",
        "0f000000f2e34743" + "0101000000" + "772e312e73716c697465",
    ]
    counts, lengths = "01000000" * 4, "".join(f"0{length}000000" for length in (1, 0, 1, 2, 1, 5))
    contents = "64" + "61" + "6262" + "6b" + "76616c7565"
    assert batch_record(seed, 1, batch).hex() == "37000000b5dee3b8" + "0201000000" + counts + lengths + contents
    assert filed_record(seed, 1).hex() == "05000000c2d9960a" + "0301000000"
