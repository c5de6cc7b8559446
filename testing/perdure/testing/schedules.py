"""How else a scenario ends without a crash: where branches are concurrent, in more than one way, and each is right.

1. A process that starts again draws its order of tasks anew, so a crash may bring an end that another seed brings without one.
   That is no fault of the recovery. Such an end is accepted as a whole: no mixture of two.
2. Looked at only once a run ends otherwise, and then once for all runs of an exploration.
3. An effect outside of steps and handlers happens whenever the function runs again, which another order of tasks can bring about
   as well as a crash. It is wrong in either, so nothing excuses that it happened more often.
4. Only an end in the state that was asked for counts. What the run itself is to satisfy besides, `check` is asked all the same.

Rejected: to give the second process the order in which the first one would have gone on. It has other tasks, some of which the
first had behind it, and a bug that needs another order would stay hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Final

from perdure.testing.scenario import FinishedRun

__all__ = ["Schedules"]

_FEW: Final = 16
_MANY: Final = 64


class Schedules:
    """The runs without a crash under further seeds.

    Args:
        run: Runs it without a crash under a seed; `None` where it does not end well.
        is_alike: Whether a run ends as another one, in everything that is compared.
        seeds: Those that are explored anyway; further ones begin after the highest.
    """

    def __init__(
        self,
        run: Callable[[int], FinishedRun | None],
        is_alike: Callable[[FinishedRun, FinishedRun], bool],
        seeds: Collection[int],
    ) -> None:
        self._run = run
        self._is_alike = is_alike
        self._seeds = _further(seeds)
        self._found: list[FinishedRun] = []
        self._count = 0

    def have(self, run: FinishedRun, whole: FinishedRun) -> bool:
        """Whether some order of tasks without a crash ends as this run does.

        Few are tried, and more where these do not all end as `whole`, the run of the same seed without a crash.
        """
        if _strays(run) - _strays(whole):
            return False
        return any(self._is_alike(run, other) for other in self.all(whole))

    def all(self, whole: FinishedRun) -> Iterator[FinishedRun]:
        """Those that differ, each once, from the ones that were run already to new ones."""
        yield from tuple(self._found)
        while self._count < (_MANY if any(not self._is_alike(each, whole) for each in self._found) else _FEW):
            self._count += 1
            run = self._run(next(self._seeds))
            if run is not None and not any(self._is_alike(run, each) for each in self._found):
                self._found.append(run)
                yield run


def _strays(run: FinishedRun) -> Counter[tuple[str, str]]:
    """How often what happened outside of steps and handlers, without a key, though it may not happen again."""
    return Counter(
        (ledger.name, effect.name)
        for ledger in run.ledgers
        for effect in run.effects[ledger.name]
        if effect.key is None and effect.workflow_id is None and not ledger.may_repeat(effect.name)
    )


def _further(seeds: Collection[int]) -> Iterator[int]:
    """Seeds without end that are not explored anyway."""
    seed = max(seeds) + 1
    while True:
        yield seed
        seed += 1
