"""The dirty list: what a batch carries, and that a refused one is as if it had never been taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.storage import AlarmChange, Batch
from perdure.workflow.pending import Pending

Change = tuple[str, bytes, bytes]


def apply(data: dict[bytes, bytes], batch: Batch) -> dict[bytes, bytes]:
    """What the contract says of a batch, on a plain dict: deletions first, then puts."""
    keys = [key for key, _ in batch.puts]
    assert len(keys) == len(set(keys)), "a key is put twice"
    gone = set(batch.deletes)
    kept = {
        key: value
        for key, value in data.items()
        if key not in gone
        and not any(key.startswith(prefix) for prefix in batch.delete_prefixes)
        and not any(start <= key < end for start, end in batch.delete_ranges)
    }
    kept.update(batch.puts)
    if batch.alarm is not None:
        kept[b"alarm"] = str(batch.alarm.wake_at_ms).encode()
    return kept


def change(pending: Pending, data: dict[bytes, bytes], what: Change) -> None:
    """Make one change, both in `pending` and, at once, in a plain dict."""
    kind, first, second = what
    match kind:
        case "put":
            pending.put(first, second)
            data[first] = second
        case "delete":
            pending.delete(first)
            data.pop(first, None)
        case "prefix":
            pending.delete_prefix(first)
            for key in [key for key in data if key.startswith(first) and key != b"alarm"]:
                del data[key]
        case "range":
            start, end = sorted((first, second))
            pending.delete_range(start, end)
            for key in [key for key in data if start <= key < end and key != b"alarm"]:
                del data[key]
        case _:
            pending.set_alarm(AlarmChange("w", len(second)))
            data[b"alarm"] = str(len(second)).encode()


keys = st.binary(min_size=1, max_size=2).map(lambda raw: bytes(byte % 3 for byte in raw))
changes = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "delete", "prefix", "range", "alarm"]), keys, keys), max_size=20
)


@given(before=changes, taken=changes, later=changes, refuse=st.booleans())
def test_batches_in_sequence_do_what_the_changes_did(
    before: list[Change], taken: list[Change], later: list[Change], refuse: bool
) -> None:
    """S15: also when the batch in between was refused and put back under what was changed meanwhile."""
    pending = Pending()
    expected: dict[bytes, bytes] = {}
    stored: dict[bytes, bytes] = {}
    for what in before:
        change(pending, expected, what)
    stored = apply(stored, pending.take())
    for what in taken:
        change(pending, expected, what)
    batch = pending.take()
    for what in later:
        change(pending, expected, what)
    if refuse:
        pending.put_back(batch)
    else:
        stored = apply(stored, batch)
    stored = apply(stored, pending.take())
    assert stored == expected
    assert not pending.take(), "nothing is left after it was taken"


def test_a_batch_is_what_was_true_when_it_was_taken() -> None:
    """S15: what changes while a batch is being written is in the next one."""
    pending = Pending()
    pending.put(b"a", b"1")
    taken = pending.take()
    pending.put(b"a", b"2")
    pending.put(b"b", b"1")
    assert taken.puts == [(b"a", b"1")]
    assert pending.take().puts == [(b"a", b"2"), (b"b", b"1")]


def test_what_is_put_back_does_not_undo_what_came_later() -> None:
    """S15: the later value, deletion and alarm win over those of the refused batch."""
    pending = Pending()
    for key in (b"changed", b"deleted", b"kept"):
        pending.put(key, b"old")
    pending.delete(b"again")
    pending.set_alarm(AlarmChange("w", 1))
    refused = pending.take()
    pending.put(b"changed", b"new")
    pending.delete(b"deleted")
    pending.put(b"again", b"new")
    pending.set_alarm(AlarmChange("w", None))
    pending.put_back(refused)
    batch = pending.take()
    assert dict(batch.puts) == {b"changed": b"new", b"kept": b"old", b"again": b"new"}
    assert b"deleted" in batch.deletes
    assert batch.alarm == AlarmChange("w", None)


def test_every_change_counts() -> None:
    """S15: the version tells a committer what its batch made durable; putting back is a change, too."""
    pending = Pending()
    versions = [pending.version]
    pending.put(b"a", b"")
    versions.append(pending.version)
    pending.delete(b"a")
    versions.append(pending.version)
    pending.delete_prefix(b"a")
    versions.append(pending.version)
    pending.delete_range(b"a", b"b")
    versions.append(pending.version)
    pending.set_alarm(AlarmChange("w", 1))
    versions.append(pending.version)
    batch = pending.take()
    assert pending.version == versions[-1], "taking changes nothing"
    pending.put_back(batch)
    versions.append(pending.version)
    assert versions == sorted(set(versions))
