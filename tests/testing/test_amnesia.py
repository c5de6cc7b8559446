"""A process forgets its globals when it dies, and nothing else is touched."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from types import ModuleType
from typing import Any

from perdure.testing.amnesia import Amnesia


class Service:
    """Something that a test put there; equal to nothing but itself, as most objects are."""


def module(**values: Any) -> ModuleType:
    made = ModuleType("shop")
    vars(made).update(values)
    return made


def test_what_was_added_changed_or_removed_is_as_it_was_first() -> None:
    shop = module(
        count=1,
        seen=["a"],
        by_id={"x": [1]},
        tags={"t"},
        queue=deque([1], maxlen=3),
        tally=Counter("ab"),
        groups=defaultdict(list, k=[1]),
        ordered=OrderedDict(a=1, b=2),
        raw=bytearray(b"ab"),
        pair=([1], {"k": 2}),
    )
    amnesia = Amnesia([], [shop])
    for _ in range(2):
        shop.count, shop.fresh = 2, 3
        shop.seen.append("b")
        shop.by_id["x"].append(2)
        shop.by_id["y"] = []
        shop.tags.clear()
        shop.queue.extend([2, 3, 4])
        shop.tally["c"] += 1
        shop.groups["new"].append(1)
        shop.ordered.move_to_end("a")
        shop.raw += b"c"
        shop.pair[0].append(2)
        shop.pair[1].clear()
        amnesia.forget()
        assert (shop.count, shop.seen, shop.by_id, shop.tags) == (1, ["a"], {"x": [1]}, {"t"})
        assert not hasattr(shop, "fresh")
        assert (list(shop.queue), shop.queue.maxlen, shop.tally) == ([1], 3, Counter("ab"))
        assert (shop.groups, shop.groups.default_factory) == ({"k": [1]}, list)
        assert (list(shop.ordered), shop.raw, shop.pair) == (["a", "b"], b"ab", ([1], {"k": 2}))


def test_what_containers_hold_stays_the_same_object() -> None:
    """Sentinels, services and locks in a dictionary are not replaced by copies, also where the dictionary was changed."""
    missing, bank = object(), Service()
    inner = [bank]
    shop = module(PRICES={"a": 1, "b": missing}, SERVICES={"bank": bank}, NESTED={"list": inner})
    services = shop.SERVICES
    amnesia = Amnesia([], [shop])
    shop.PRICES["a"] = 2
    shop.SERVICES.clear()
    inner.append(Service())
    shop.NESTED["list"] = []
    amnesia.forget()
    assert shop.PRICES["a"] == 1
    assert shop.PRICES["b"] is missing
    assert shop.SERVICES is services
    assert shop.SERVICES["bank"] is bank
    assert shop.NESTED["list"] is inner
    assert len(inner) == 1
    assert inner[0] is bank


def test_a_container_that_holds_itself_is_no_trouble() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    shop = module(loop=loop)
    amnesia = Amnesia([], [shop])
    loop.append(2)
    amnesia.forget()
    assert len(loop) == 2
    assert loop[1] is loop


def test_names_hold_what_they_held_first_whatever_they_hold_now() -> None:
    """A global that was made lazily, bound anew or taken away is as it was; one that holds objects, now as then, is left."""
    bank, late, rows = Service(), Service(), [1]
    shop = module(client=None, rows=rows, limits=(1, 2), gone="x", bank=bank, other=bank)
    amnesia = Amnesia([], [shop])
    shop.client, shop.rows, shop.limits, shop.bank, shop.other, shop.fresh = Service(), [2], (3,), 5, late, {"a": 1}
    del shop.gone
    amnesia.forget()
    assert (shop.client, shop.rows, shop.limits, shop.gone, shop.bank) == (None, [1], (1, 2), "x", bank)
    assert shop.rows is rows
    assert shop.other is late
    assert not hasattr(shop, "fresh")
