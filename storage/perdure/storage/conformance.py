"""What every driver must do, as tests to run on your own.

Subclass `DriverConformance`, say how a driver is opened and reopened, and let pytest (with pytest-trio) collect it:

    class TestMyDriver(DriverConformance):
        driver_kind = "mine"

        async def open_driver(self):
            return await MyDriver.open(...)          # an empty namespace of its own

        async def reopen(self, driver):
            await driver.aclose()
            return await MyDriver.open(driver.name)  # the same namespace, as after a restart

1. Each test takes one fresh namespace from `open_driver` and closes every driver it used.
2. Nothing but the `Driver` contract is relied on; what the contract leaves open is not tested.
3. The module imports no test framework, so that any that runs `async` methods can run it. Checks are functions whose
   failures say what was expected, as pytest rewrites `assert` only in its own suites.

Rejected: a function that runs all checks in one go. It stops at the first failure and names no guarantee.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar, TypeAlias, TypeVar

from perdure.storage.driver import VALUE_BYTES_MAX, AlarmChange, Batch, Driver
from perdure.storage.errors import BatchRefusedError, DriverClosedError, ValueTooLargeError
from perdure.storage.limits import MAX_KV_BATCH_ENTRIES, MAX_KV_BATCH_PAYLOAD_BYTES
from perdure.storage.split import commit_batch

__all__ = ["DriverConformance"]

_ID = "conformance"
_Pairs: TypeAlias = Sequence[tuple[bytes, bytes]]
_RefusalT = TypeVar("_RefusalT", bound=BatchRefusedError)

# One key for each way in which bytes, prefixes and bounds can go wrong, in order.
_KEYS = [
    b"",
    b"\x00",
    b"\x00\x00",
    b"\x00\xff",
    b"\x01",
    b"a",
    b"a\x00",
    b"a\x00\x00",
    b"a\xff",
    b"a\xff\xff",
    b"b",
    b"\x7f",
    b"\x80",
    b"\xfe\xff",
    b"\xff",
    b"\xff\x00",
    b"\xff\xff",
    b"\xff\xff\x01",
]


class DriverConformance:
    """The suite (scenario S38). Override `open_driver` and `reopen`."""

    driver_kind: ClassVar[str] = "custom"
    """Names the kind of driver in test reports."""

    async def open_driver(self) -> Driver:
        """Open a driver on a new, empty namespace."""
        raise NotImplementedError(f"{type(self).__name__} must override open_driver()")

    async def reopen(self, driver: Driver) -> Driver:
        """Close `driver` and open another on the same namespace, as after a restart of the process."""
        raise NotImplementedError(f"{type(self).__name__} must override reopen()")

    async def test_it_is_a_driver(self) -> None:
        """S38: it has every method and property of the contract."""
        async with self._opened() as driver:
            _check(_is_driver(driver), f"{driver!r} lacks a method or property of perdure.storage.Driver")
            _check(
                driver.value_bytes_max >= VALUE_BYTES_MAX,
                f"value_bytes_max is {driver.value_bytes_max}, every driver takes {VALUE_BYTES_MAX}",
            )

    async def test_keys_are_listed_in_bytewise_order(self) -> None:
        """S38: whatever the order of writing, and from 0x00 to 0xff."""
        async with self._filled(reversed_order=True) as driver:
            _same_pairs(await driver.list(b""), [(key, _value(key)) for key in _KEYS], "list of everything")

    async def test_a_prefix_lists_exactly_the_keys_that_start_with_it(self) -> None:
        """S38: at both ends of the byte range too; a key is its own prefix, and an empty prefix lists all."""
        async with self._filled() as driver:
            for prefix in [*_KEYS, b"c", b"\xff\xff\xff", b"a\x01"]:
                expected = [(key, _value(key)) for key in _KEYS if key.startswith(prefix)]
                _same_pairs(await driver.list(prefix), expected, f"list({prefix!r})")

    async def test_a_missing_key_is_none_and_an_empty_value_is_not(self) -> None:
        """S38: absent and empty are told apart, in `get` and in `list`."""
        async with self._opened() as driver:
            await driver.set(b"empty", b"")
            _same(await driver.get(b"empty"), b"", "the empty value")
            _same(await driver.get(b"missing"), None, "the missing key")
            _same_pairs(await driver.list(b"e"), [(b"empty", b"")], "list with an empty value")

    async def test_values_come_back_as_they_were(self) -> None:
        """S38: all bytes, and none taken for text or a number."""
        async with self._opened() as driver:
            for value in (bytes(range(256)), b"\x00", b"0", b"text", b"\xff" * 5000):
                await driver.set(b"key", value)
                got = await driver.get(b"key")
                _same(got, value, "the value")
                _check(type(got) is bytes, f"the value came back as {type(got).__name__}, not bytes")

    async def test_a_later_put_replaces_an_earlier_one(self) -> None:
        """S38: by `set` and by `batch`, and with a shorter value."""
        async with self._opened() as driver:
            await driver.set(b"key", b"first, and longer")
            await driver.set(b"key", b"second")
            _same(await driver.get(b"key"), b"second", "after set")
            await driver.batch(Batch(puts=[(b"key", b"3")]))
            _same_pairs(await driver.list(b""), [(b"key", b"3")], "after batch")

    async def test_delete_removes_one_key(self) -> None:
        """S38: only that one, and a missing one is no error."""
        async with self._filled() as driver:
            await driver.delete(b"a\x00")
            await driver.delete(b"missing")
            _same(await driver.get(b"a\x00"), None, "the deleted key")
            _same([key for key, _ in await driver.list(b"")], [key for key in _KEYS if key != b"a\x00"], "what is left")

    async def test_delete_prefix_removes_exactly_the_keys_that_start_with_it(self) -> None:
        """S38: alone and in a batch, at 0x00 and 0xff, and everything for the empty prefix."""
        for prefix in (b"a", b"a\xff", b"\x00", b"\xff", b"\xff\xff", b"\xff\xff\xff", b"missing", b""):
            expected = [key for key in _KEYS if not key.startswith(prefix)]
            async with self._filled() as driver:
                await driver.delete_prefix(prefix)
                _same(_keys(await driver.list(b"")), expected, f"after delete_prefix({prefix!r})")
            async with self._filled() as driver:
                await driver.batch(Batch(delete_prefixes=[prefix]))
                _same(_keys(await driver.list(b"")), expected, f"after a batch with prefix {prefix!r}")

    async def test_delete_range_includes_its_start_and_not_its_end(self) -> None:
        """S38: alone and in a batch; a range that is empty or the wrong way round removes nothing."""
        ranges = [
            (b"a", b"b"),
            (b"a\x00", b"a\xff"),
            (b"", b"\xff\xff\xff"),
            (b"\x00", b"\x00\x00"),
            (b"\xff", b"\xff\xff"),
            (b"a", b"a"),
            (b"b", b"a"),
        ]
        for start, end in ranges:
            expected = [key for key in _KEYS if not start <= key < end]
            async with self._filled() as driver:
                await driver.delete_range(start, end)
                _same(_keys(await driver.list(b"")), expected, f"after delete_range({start!r}, {end!r})")
            async with self._filled() as driver:
                await driver.batch(Batch(delete_ranges=[(start, end)]))
                _same(_keys(await driver.list(b"")), expected, f"after a batch with range {start!r} to {end!r}")

    async def test_a_batch_does_all_it_holds(self) -> None:
        """S38: puts, each kind of deletion and the alarm, in one call."""
        async with self._filled() as driver:
            await driver.batch(
                Batch(
                    puts=[(b"new", b"1"), (b"b", b"2")],
                    deletes=[b"", b"missing"],
                    delete_prefixes=[b"a\x00", b"\xff"],
                    delete_ranges=[(b"\x00", b"\x01")],
                    alarm=AlarmChange(_ID, 5),
                )
            )
            left = {key: value for key, value in await driver.list(b"") if key in _KEYS or key == b"new"}
            untouched = (b"\x01", b"a", b"a\xff", b"a\xff\xff", b"\x7f", b"\x80", b"\xfe\xff")
            expected = {key: _value(key) for key in untouched}
            _same(left, {**expected, b"b": b"2", b"new": b"1"}, "what the batch left")
            _same(await driver.get_alarm(_ID), 5, "the alarm")

    async def test_a_batch_deletes_before_it_puts(self) -> None:
        """S38: what a batch puts is there after it, whatever else it deletes."""
        async with self._filled() as driver:
            await driver.batch(
                Batch(
                    puts=[(b"a", b"1"), (b"a\x00", b"2"), (b"b", b"3")],
                    deletes=[b"b"],
                    delete_prefixes=[b"a"],
                    delete_ranges=[(b"a\x00", b"c")],
                )
            )
            _same(
                [pair for pair in await driver.list(b"") if b"a" <= pair[0] < b"c"],
                [(b"a", b"1"), (b"a\x00", b"2"), (b"b", b"3")],
                "what was put",
            )

    async def test_an_empty_batch_changes_nothing(self) -> None:
        """S38: and is no error."""
        async with self._filled() as driver:
            await driver.batch(Batch())
            _same(_keys(await driver.list(b"")), _KEYS, "the keys")

    async def test_a_refused_batch_leaves_nothing(self) -> None:
        """S38: a value over the limit refuses the whole batch, and the same without it is taken afterwards."""
        async with self._filled() as driver:
            before = await driver.list(b"")
            limit = driver.value_bytes_max
            batch = Batch(
                puts=[(b"a", b"changed"), (b"large", bytes(limit + 1)), (b"z", b"new")],
                deletes=[b"b"],
                delete_prefixes=[b"\xff"],
                alarm=AlarmChange(_ID, 5),
            )
            error = await _refused(driver, batch, ValueTooLargeError)
            _same((error.size, error.limit), (limit + 1, limit), "size and limit in the error")
            _same_pairs(await driver.list(b""), before, "the namespace")
            _same(await driver.get_alarm(_ID), None, "the alarm")
            batch.puts = [(b"a", b"changed")]
            await driver.batch(batch)
            _same(await driver.get(b"a"), b"changed", "the value after trying again")

    async def test_the_largest_value_is_taken_and_one_byte_more_is_not(self) -> None:
        """S38: by `set` and, cut or not, by `commit_batch`."""
        async with self._opened() as driver:
            await driver.set(b"key", bytes(VALUE_BYTES_MAX))
            await commit_batch(driver, Batch(puts=[(b"other", b"\x01" * VALUE_BYTES_MAX), (b"small", b"")]))
            _same(await driver.get(b"key"), bytes(VALUE_BYTES_MAX), "the value set")
            _same(await driver.get(b"other"), b"\x01" * VALUE_BYTES_MAX, "the value in a batch")
            try:
                await driver.set(b"key", bytes(driver.value_bytes_max + 1))
            except ValueTooLargeError:
                pass
            else:
                raise AssertionError("a value over value_bytes_max was taken")
            _same(await driver.get(b"key"), bytes(VALUE_BYTES_MAX), "the value after the refusal")

    async def test_a_large_batch_is_taken_whole_or_refused_whole(self) -> None:
        """S38: an atomic driver takes it or refuses it; any driver takes it through `commit_batch`."""
        many = [(b"many%05d" % index, b"x" * 10) for index in range(MAX_KV_BATCH_ENTRIES * 3)]
        heavy = [(b"heavy%05d" % index, b"x" * 100_000) for index in range(MAX_KV_BATCH_PAYLOAD_BYTES // 100_000 + 2)]
        for puts in (many, heavy):
            async with self._opened() as driver:
                batch = Batch(puts=puts)
                try:
                    await driver.batch(batch)
                except BatchRefusedError:
                    _same_pairs(await driver.list(b""), [], "what a refused batch left")
                else:
                    _same_pairs(await driver.list(b""), puts, "what the batch put")
                await commit_batch(driver, Batch(puts=puts, delete_prefixes=[b"many", b"heavy"]))
                _same_pairs(await driver.list(b""), puts, "what commit_batch put")

    async def test_a_batch_of_the_common_limits_is_taken_by_every_driver(self) -> None:
        """S38: 128 entries, and 976 KiB of keys and values."""
        async with self._opened() as driver:
            puts = [(b"%03d" % index, b"x") for index in range(MAX_KV_BATCH_ENTRIES - 1)]
            await driver.batch(Batch(puts=puts, alarm=AlarmChange(_ID, 1)))
            _same_pairs(await driver.list(b"0"), puts[:100], "the first hundred")
            _same_pairs(await driver.list(b"1"), puts[100:], "the others")
            await driver.batch(Batch(puts=[(b"k" * 24, bytes(MAX_KV_BATCH_PAYLOAD_BYTES - 24))]))
            _same(len(await driver.get(b"k" * 24) or b""), MAX_KV_BATCH_PAYLOAD_BYTES - 24, "the size of the value")

    async def test_an_alarm_is_set_replaced_and_cleared(self) -> None:
        """S38: by its methods and in a batch, from 0 to the largest number, and clearing twice is fine."""
        async with self._opened() as driver:
            _same(await driver.get_alarm(_ID), None, "the alarm of a new namespace")
            for wake_at_ms in (1_700_000_000_000, 5, 0, 2**64 - 1):
                await driver.set_alarm(_ID, wake_at_ms)
                _same(await driver.get_alarm(_ID), wake_at_ms, "the alarm after set_alarm")
            await driver.batch(Batch(puts=[(b"key", b"")], alarm=AlarmChange(_ID, 7)))
            _same(await driver.get_alarm(_ID), 7, "the alarm after a batch")
            await driver.batch(Batch(puts=[(b"key", b"1")]))
            _same(await driver.get_alarm(_ID), 7, "the alarm after a batch that does not mention it")
            await driver.batch(Batch(alarm=AlarmChange(_ID, None)))
            _same(await driver.get_alarm(_ID), None, "the alarm after a batch that clears it")
            await driver.set_alarm(_ID, 9)
            await driver.clear_alarm(_ID)
            await driver.clear_alarm(_ID)
            _same(await driver.get_alarm(_ID), None, "the alarm after clear_alarm")

    async def test_an_alarm_out_of_range_is_refused(self) -> None:
        """S38: by `set_alarm` and in a batch, of which then nothing is written."""
        async with self._opened() as driver:
            await driver.set_alarm(_ID, 3)
            for wake_at_ms in (-1, 2**64):
                await _refused(driver, Batch(puts=[(b"k", b"")], alarm=AlarmChange(_ID, wake_at_ms)), BatchRefusedError)
                try:
                    await driver.set_alarm(_ID, wake_at_ms)
                except BatchRefusedError:
                    pass
                else:
                    raise AssertionError(f"an alarm at {wake_at_ms} ms was taken")
            _same((await driver.get(b"k"), await driver.get_alarm(_ID)), (None, 3), "value and alarm")

    async def test_everything_is_there_after_reopening(self) -> None:
        """S38: values, deletions and the alarm, however they were written."""
        async with self._filled() as driver:
            await driver.batch(Batch(puts=[(b"new", b"1")], deletes=[b"a"], alarm=AlarmChange(_ID, 11)))
            await driver.set(b"set", b"2")
            await driver.delete(b"b")
            await driver.delete_prefix(b"\xff")
            await driver.delete_range(b"\x00", b"\x02")
            expected = await driver.list(b"")
            reopened = await self.reopen(driver)
            try:
                _same_pairs(await reopened.list(b""), expected, "the namespace after reopening")
                _same(await reopened.get_alarm(_ID), 11, "the alarm after reopening")
                await reopened.set(b"new", b"3")
                _same(await reopened.get(b"new"), b"3", "a value written after reopening")
            finally:
                await reopened.aclose()

    async def test_two_namespaces_are_apart(self) -> None:
        """S38: what is written to one is not in another."""
        async with self._opened() as one, self._opened() as other:
            await one.batch(Batch(puts=[(b"key", b"1")], alarm=AlarmChange(_ID, 1)))
            _same_pairs(await other.list(b""), [], "the other namespace")
            _same(await other.get_alarm(_ID), None, "the other alarm")

    async def test_a_closed_driver_refuses_everything(self) -> None:
        """S38: with `DriverClosedError`, whatever is asked of it; closing again is fine."""
        async with self._filled() as driver:
            await driver.aclose()
            await driver.aclose()
            uses: dict[str, Callable[[], Awaitable[object]]] = {
                "get": lambda: driver.get(b"a"),
                "set": lambda: driver.set(b"a", b""),
                "delete": lambda: driver.delete(b"a"),
                "delete_prefix": lambda: driver.delete_prefix(b"a"),
                "delete_range": lambda: driver.delete_range(b"a", b"b"),
                "list": lambda: driver.list(b""),
                "batch": lambda: driver.batch(Batch(puts=[(b"a", b"")])),
                "set_alarm": lambda: driver.set_alarm(_ID, 1),
                "get_alarm": lambda: driver.get_alarm(_ID),
                "clear_alarm": lambda: driver.clear_alarm(_ID),
            }
            for name, use in uses.items():
                try:
                    await use()
                except DriverClosedError:
                    continue
                raise AssertionError(f"{name} worked on a closed driver")

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[Driver, None]:
        driver = await self.open_driver()
        try:
            yield driver
        finally:
            await driver.aclose()

    @asynccontextmanager
    async def _filled(self, *, reversed_order: bool = False) -> AsyncGenerator[Driver, None]:
        async with self._opened() as driver:
            for key in reversed(_KEYS) if reversed_order else _KEYS:
                await driver.set(key, _value(key))
            yield driver


def _is_driver(candidate: object) -> bool:
    return isinstance(candidate, Driver)


def _value(key: bytes) -> bytes:
    return b"value of " + key


def _keys(pairs: _Pairs) -> list[bytes]:
    return [key for key, _ in pairs]


async def _refused(driver: Driver, batch: Batch, error_type: type[_RefusalT]) -> _RefusalT:
    try:
        await driver.batch(batch)
    except error_type as error:
        return error
    raise AssertionError(f"the batch was taken, where {error_type.__name__} was expected")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: expected {_short(repr(expected))}, found {_short(repr(found))}")


def _same_pairs(found: _Pairs, expected: _Pairs, what: str) -> None:
    # A driver may return any sequence.
    _same(list(found), list(expected), what)


def _short(text: str) -> str:
    return text if len(text) <= 2000 else f"{text[:1000]} ... {text[-1000:]}"
