"""The store whose drivers are coded: no way around the codec, and all else as the store below does it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from value_codecs import SealedCodec

from perdure.storage import (
    CatalogRow,
    CodedDriver,
    CodedStore,
    FileStore,
    MemoryStore,
    SqliteDriver,
    Store,
    encode_value,
    layout,
)

DATA = encode_value("the secret")
METHODS = sorted(name for name in vars(Store) if not name.startswith("_") and name not in ("open_driver", "open_own"))


class Recorder:
    """A store that answers every call with what it was asked."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            return name, args, options

        async def call_async(*args: Any, **options: Any) -> Any:
            return call(*args, **options)

        return call_async if inspect.iscoroutinefunction(getattr(Store, name)) else call


@pytest.mark.parametrize("name", METHODS)
async def test_every_other_method_passes_all_that_it_is_given_to_the_store_below(name: str) -> None:
    store: Any = CodedStore(Recorder(), SealedCodec())  # type: ignore[arg-type]
    args: list[Any] = []
    options: dict[str, Any] = {}
    for parameter in list(inspect.signature(getattr(Store, name)).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY:
            options[parameter.name] = object()
        else:
            args.append(object())
    given = getattr(store, name)(*args, **options)
    answer = await given if inspect.isawaitable(given) else given
    assert answer in ((name, tuple(args), options), None)
    assert answer is not None or inspect.signature(getattr(Store, name)).return_annotation == "None"


async def test_every_driver_that_it_opens_is_coded() -> None:
    store = CodedStore(MemoryStore(), SealedCodec())
    assert isinstance(store, Store)
    await store.acquire()
    row = CatalogRow("new", "order", "pending", 0, False, 1_000, 1_000)
    created, is_empty = await store.create_driver(row)
    assert not is_empty  # the store below cannot tell
    assert await store.get_row("new") == row
    opened = [await store.open_driver("w", create=True), await store.open_own(), created]
    assert [type(driver) for driver in opened] == [CodedDriver] * 3
    for driver in opened:
        await driver.aclose()
    await store.aclose()


async def test_a_backup_is_as_coded_as_the_files(tmp_path: Path) -> None:
    store = CodedStore(FileStore(tmp_path / "data"), SealedCodec())
    await store.acquire()
    driver, is_empty = await store.create_driver(CatalogRow("w", "order", "pending", 0, False, 1_000, 1_000))
    assert is_empty
    await driver.set(layout.INPUT_KEY, DATA)
    await store.backup("w", tmp_path / "backup.sqlite")
    await driver.aclose()
    await store.aclose()
    copy = await SqliteDriver.open(tmp_path / "backup.sqlite")
    assert DATA not in (await copy.get(layout.INPUT_KEY) or b"")
    assert await CodedDriver(copy, SealedCodec(), "w").get(layout.INPUT_KEY) == DATA
    await copy.aclose()


async def test_a_codec_without_room_leaves_no_driver_open() -> None:
    class Large(SealedCodec):
        overhead_bytes = 2_000_000

    inner = MemoryStore()
    store = CodedStore(inner, Large())
    await store.acquire()
    with pytest.raises(ValueError, match="leaves no room"):
        await store.open_driver("w", create=True)
    await (await inner.open_driver("w")).aclose()
    await store.aclose()
