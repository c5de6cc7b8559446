"""The driver that codes user data: what reaches the driver below, what is refused, and what is read of what was there."""

from __future__ import annotations

import pytest
from harness import Namespace
from value_codecs import KeyRing, SealedCodec, XorCodec

from perdure.storage import (
    AlarmChange,
    Batch,
    BatchRefusedError,
    CodedDriver,
    Driver,
    MemoryDriver,
    ValueCodecError,
    ValueCodecRefusedError,
    ValueContext,
    ValueTooLargeError,
    encode_value,
    layout,
)
from perdure.storage.codec import CODED_BYTES_MAX, CODED_MARK
from perdure.storage.schema import MailboxMessage, decode_message, encode_message

DATA = encode_value("the secret")
MARKED = (layout.CODEC_KEY, layout.encode_u64(1))


class FailingCodec(SealedCodec):
    """Fails while `is_down`."""

    is_down = False

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        if self.is_down:
            raise ConnectionError("no key service")
        return super().encode(data, context)


class WaitingDriver(MemoryDriver):
    """Never writes without waiting."""

    def batch_nowait(self, batch: Batch) -> bool:
        return False


async def test_user_data_is_coded_below_and_plain_above(namespace: Namespace) -> None:
    inner = await namespace.driver()
    driver = CodedDriver(inner, SealedCodec(), "w")
    await driver.batch(Batch(puts=[(layout.INPUT_KEY, DATA), (layout.STATE_KEY, b"running")]))
    await driver.set(layout.OUTPUT_KEY, DATA)
    stored = await namespace.dump()
    assert stored[layout.STATE_KEY] == b"running"
    assert DATA not in b"".join(stored.values())
    assert await driver.get(layout.INPUT_KEY) == await driver.get(layout.OUTPUT_KEY) == DATA
    assert await driver.get(layout.ERROR_KEY) is None
    restarted = CodedDriver(await namespace.restart(), SealedCodec(), "w")
    assert dict(await restarted.list(layout.WORKFLOW_PREFIX)) == {
        layout.INPUT_KEY: DATA,
        layout.OUTPUT_KEY: DATA,
        layout.STATE_KEY: b"running",
    }


async def test_the_first_coded_value_and_the_sign_of_it_are_one_batch(namespace: Namespace) -> None:
    """Else a kill in between would leave coded values that nothing warns of."""
    inner = await namespace.driver()
    driver = CodedDriver(inner, SealedCodec(), "w")
    await driver.batch(Batch(puts=[(layout.STATE_KEY, b"running")]))
    assert MARKED not in inner.batches[-1].puts, "nothing is coded yet"
    await driver.batch(Batch(puts=[(layout.INPUT_KEY, DATA)]))
    assert [key for key, _ in inner.batches[-1].puts] == [layout.INPUT_KEY, layout.CODEC_KEY]
    assert inner.batches[-1].puts[-1] == MARKED
    await driver.batch(Batch(puts=[(layout.OUTPUT_KEY, DATA)]))
    assert MARKED not in inner.batches[-1].puts, "it is there already"
    assert await driver.get(layout.CODEC_KEY) is None
    assert layout.CODEC_KEY not in dict(await driver.list(layout.OWN_PREFIX))
    restarted = await namespace.restart()
    driver = CodedDriver(restarted, SealedCodec(), "w")
    await driver.list(layout.OWN_PREFIX)
    await driver.batch(Batch(puts=[(layout.OUTPUT_KEY, DATA)]))
    assert MARKED not in restarted.batches[-1].puts, "it was seen when the namespace was loaded"


@pytest.mark.parametrize(
    "deletion",
    [
        Batch(delete_prefixes=[b""]),
        Batch(delete_prefixes=[layout.OWN_PREFIX]),
        Batch(delete_ranges=[(layout.CODEC_KEY, layout.CODEC_KEY + b"\0")]),
        Batch(deletes=[layout.CODEC_KEY]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_the_sign_is_written_again_after_it_was_deleted(deletion: Batch, at_once: bool) -> None:
    inner = MemoryDriver()
    driver = CodedDriver(inner, SealedCodec(), "w")
    await driver.set(layout.INPUT_KEY, DATA)
    if at_once:
        deletion = Batch(
            [(layout.OUTPUT_KEY, DATA)], deletion.deletes, deletion.delete_prefixes, deletion.delete_ranges
        )
    await driver.batch(deletion)
    assert (layout.CODEC_KEY in inner.data) == at_once
    await driver.set(layout.OUTPUT_KEY, DATA)
    assert layout.CODEC_KEY in inner.data


async def test_a_batch_that_cannot_be_coded_is_refused_whole_and_can_be_written_later(namespace: Namespace) -> None:
    inner = await namespace.driver()
    codec = FailingCodec()
    driver = CodedDriver(inner, codec, "w")
    codec.is_down = True
    batch = Batch(puts=[(layout.STATE_KEY, b"running"), (layout.INPUT_KEY, DATA)], alarm=AlarmChange("w", 7))
    with pytest.raises(ValueCodecRefusedError, match="no key service") as caught:
        await driver.batch(batch)
    assert isinstance(caught.value, BatchRefusedError)
    assert isinstance(caught.value.__cause__, ConnectionError)
    with pytest.raises(ValueCodecRefusedError, match="no key service"):
        CodedDriver(MemoryDriver(), codec, "w").batch_nowait(batch)
    assert await namespace.dump() == {}
    codec.is_down = False
    await driver.batch(batch)
    assert await driver.get(layout.INPUT_KEY) == DATA
    assert await driver.get_alarm("w") == 7


async def test_it_writes_without_waiting_where_the_driver_below_does() -> None:
    quick = CodedDriver(MemoryDriver(), SealedCodec(), "w")
    assert quick.batch_nowait(Batch(puts=[(layout.INPUT_KEY, DATA)]))
    assert await quick.get(layout.INPUT_KEY) == DATA
    assert not CodedDriver(MemoryDriver(atomic_batch=False), SealedCodec(), "w").batch_nowait(Batch())


async def test_a_batch_that_has_to_wait_after_all_is_coded_once() -> None:
    codec = XorCodec()
    inner = WaitingDriver()
    driver = CodedDriver(inner, codec, "w")
    batch = Batch(puts=[(layout.INPUT_KEY, DATA)])
    assert not driver.batch_nowait(batch)
    await driver.batch(batch)
    assert codec.kinds == ["input"]
    other = Batch(puts=[(layout.INPUT_KEY, encode_value("another"))])
    assert not driver.batch_nowait(batch)
    await driver.batch(other)
    assert await driver.get(layout.INPUT_KEY) == encode_value("another")


@pytest.mark.parametrize("atomic_batch", [True, False])
async def test_the_largest_value_fits_and_one_more_byte_is_refused(atomic_batch: bool) -> None:
    inner = MemoryDriver(atomic_batch=atomic_batch)
    driver = CodedDriver(inner, SealedCodec(), "w")
    assert driver.value_bytes_max == inner.value_bytes_max - SealedCodec.overhead_bytes - CODED_BYTES_MAX
    largest = bytes(driver.value_bytes_max)
    await driver.set(layout.INPUT_KEY, largest)
    assert await driver.get(layout.INPUT_KEY) == largest
    message = MailboxMessage("id", "name", b"", 7)
    room = driver.value_bytes_max - len(encode_message(message)) - 2
    message = MailboxMessage("id", "name", bytes(room), 7)
    assert len(encode_message(message)) == driver.value_bytes_max
    await driver.set(layout.message_key(0), encode_message(message))
    assert decode_message(await driver.get(layout.message_key(0)) or b"") == message
    for key in (layout.INPUT_KEY, b"any"):
        with pytest.raises(ValueTooLargeError) as caught:
            await driver.set(key, largest + b"\0")
        assert caught.value.limit == driver.value_bytes_max


async def test_a_batch_that_outgrows_what_the_driver_below_takes_is_cut_there() -> None:
    """128 entries of a size that fits by a hair, before coding."""
    inner = MemoryDriver(atomic_batch=False)
    driver = CodedDriver(inner, SealedCodec(), "w")
    puts = [(layout.loop_start_key("id", number), bytes(976 * 1024 // 128 - 40)) for number in range(128)]
    await driver.batch(Batch(puts=puts))
    assert sorted(await driver.list(layout.LOOP_START_PREFIX)) == sorted(puts)


async def test_values_from_before_the_codec_are_read_and_coded_when_they_are_written_next() -> None:
    inner = MemoryDriver()
    await inner.set(layout.INPUT_KEY, DATA)
    driver = CodedDriver(inner, SealedCodec(), "w")
    assert await driver.get(layout.INPUT_KEY) == DATA
    await driver.set(layout.INPUT_KEY, DATA)
    assert inner.data[layout.INPUT_KEY].startswith(CODED_MARK)


async def test_keys_rotate_in_the_users_codec() -> None:
    inner = MemoryDriver()
    old, new = SealedCodec(b"old"), SealedCodec(b"new")
    await CodedDriver(inner, old, "w").set(layout.INPUT_KEY, DATA)
    ring = CodedDriver(inner, KeyRing([new, old]), "w")
    assert await ring.get(layout.INPUT_KEY) == DATA
    await ring.set(layout.OUTPUT_KEY, DATA)
    assert await CodedDriver(inner, new, "w").get(layout.OUTPUT_KEY) == DATA
    for key, codec in ((layout.INPUT_KEY, new), (layout.OUTPUT_KEY, old)):
        with pytest.raises(ValueCodecError):
            await CodedDriver(inner, codec, "w").get(key)
    with pytest.raises(ValueCodecError):
        await CodedDriver(inner, old, "w").list(layout.WORKFLOW_PREFIX)


async def test_the_driver_of_another_workflow_is_refused_before_anything_is_written() -> None:
    """Else what it wrote would be bound to an id under which nobody looks for it."""
    inner = MemoryDriver()
    driver = CodedDriver(inner, SealedCodec(), "w")
    with pytest.raises(ValueCodecRefusedError, match=r"write CodedDriver\(driver, codec, 'v'\)"):
        await driver.batch(Batch(puts=[(layout.INPUT_KEY, DATA), (layout.WORKFLOW_ID_KEY, b"v")]))
    assert inner.data == {}


async def test_one_inside_another_codes_twice() -> None:
    inner = MemoryDriver()
    outer: Driver = CodedDriver(CodedDriver(inner, SealedCodec(b"1"), "w"), SealedCodec(b"2"), "w")
    await outer.set(layout.INPUT_KEY, DATA)
    assert await outer.get(layout.INPUT_KEY) == DATA


async def test_a_driver_without_room_for_the_overhead_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        CodedDriver(MemoryDriver(value_bytes_max=20), SealedCodec(), "w")
