"""The memory driver: what it adds to the contract that `tests/conformance` checks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import assert_no_checkpoints

from perdure.storage.driver import AlarmChange, Batch
from perdure.storage.errors import DriverClosedError
from perdure.storage.layout import ALARM_KEY, encode_u64
from perdure.storage.memory import MemoryDriver


async def test_a_driver_over_the_data_of_an_old_one_is_a_restart():
    data = {b"b": b"2", b"a": b"1"}
    first = MemoryDriver(data)
    await first.set(b"c", b"3")
    await first.aclose()
    assert first.data is data
    second = MemoryDriver(first.data)
    assert await second.list(b"") == [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]
    with pytest.raises(DriverClosedError, match="open another"):
        await first.get(b"a")


async def test_nothing_is_a_checkpoint():
    driver = MemoryDriver()
    with assert_no_checkpoints():
        await driver.batch(Batch(puts=[(b"a", b"1")], alarm=AlarmChange("w", 1)))
        await driver.set(b"b", b"2")
        await driver.get(b"a")
        await driver.list(b"")
        await driver.delete(b"a")
        await driver.delete_prefix(b"a")
        await driver.delete_range(b"a", b"b")
        await driver.set_alarm("w", 2)
        await driver.get_alarm("w")
        await driver.clear_alarm("w")
        await driver.aclose()


async def test_the_alarm_is_a_value_under_its_key_as_in_a_file():
    driver = MemoryDriver()
    await driver.set_alarm("w", 1_700_000_000_000)
    assert driver.data == {ALARM_KEY: encode_u64(1_700_000_000_000)}


async def test_changes_made_through_data_are_seen():
    driver = MemoryDriver({b"a": b"1", b"c": b"3"})
    assert [key for key, _ in await driver.list(b"")] == [b"a", b"c"]
    del driver.data[b"c"]
    driver.data[b"b"] = b"2"
    assert await driver.list(b"") == [(b"a", b"1"), (b"b", b"2")]
    await driver.delete(b"b")
    assert driver.data == {b"a": b"1"}
    data = driver.data
    assert len(await driver.list(b"")) == 1
    data[b"0"] = b"0"
    assert await driver.list(b"") == [(b"0", b"0"), (b"a", b"1")]


def test_a_limit_below_one_byte_is_an_error():
    with pytest.raises(ValueError, match="at least 1"):
        MemoryDriver(value_bytes_max=0)


_keys = st.binary(max_size=3).map(lambda key: key.translate(bytes([0, 1, 0xFE, 0xFF] * 64)))
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), _keys, st.binary(max_size=2)),
        st.tuples(st.just("delete"), _keys),
        st.tuples(st.just("delete_prefix"), _keys),
        st.tuples(st.just("delete_range"), _keys, _keys),
        st.tuples(st.just("list"), _keys),
    ),
    max_size=200,
)


@given(_operations)
@settings(max_examples=150, deadline=None)
def test_any_sequence_of_operations_does_what_it_does_to_a_dict(operations):
    """The sorted list of keys never disagrees with the dict."""

    async def run() -> None:
        driver = MemoryDriver()
        model: dict[bytes, bytes] = {}
        for name, *arguments in operations:
            result = await getattr(driver, name)(*arguments)
            match name, arguments:
                case "set", [key, value]:
                    model[key] = value
                case "delete", [key]:
                    model.pop(key, None)
                case "delete_prefix", [prefix]:
                    model = {key: value for key, value in model.items() if not key.startswith(prefix)}
                case "delete_range", [start, end]:
                    model = {key: value for key, value in model.items() if not start <= key < end}
                case "list", [prefix]:
                    assert result == sorted(pair for pair in model.items() if pair[0].startswith(prefix))
        assert await driver.list(b"") == sorted(model.items())
        assert driver.data == model

    _finish(run())


async def test_many_new_keys_between_two_lists_stay_in_order():
    driver = MemoryDriver()
    await driver.set(b"m", b"")
    assert len(await driver.list(b"")) == 1
    for index in range(500, 0, -1):
        await driver.set(b"%03d" % index, b"")
    keys = [key for key, _ in await driver.list(b"")]
    assert keys == sorted(keys)
    assert len(keys) == 501


def _finish(coroutine) -> None:
    """Run a coroutine that never waits."""
    with pytest.raises(StopIteration):
        coroutine.send(None)
