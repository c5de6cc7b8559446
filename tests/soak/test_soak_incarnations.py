"""The soak of simulated processes: it comes to as many as were asked for, and what it finds it finds again."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import soak_incarnations
from incarnations import Tally
from soak_incarnations import disturbance_of, play, play_chunk, program_of, soak


@pytest.fixture(autouse=True)
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """A count of the test's own."""
    made = Tally()
    monkeypatch.setattr("incarnations.tally", made)
    return made


def test_a_small_soak_ends_with_what_was_asked_for_and_without_a_problem() -> None:
    """S39: random programs and whole supervisors, in a process of its own."""
    campaign = soak(60, 1, 1)
    assert campaign.found == {}
    assert campaign.tally.counted >= 60
    assert any(column == "again" for _, column in campaign.tally.cells)
    assert "0 problems" in list(campaign.lines())[-1]


def test_a_seed_is_the_same_processes_dying_at_the_same_writes(tally: Tally) -> None:
    """S39: so what was found can be found again."""
    seen: list[list[object]] = []
    for _ in range(2):
        tally.clear()
        for seed in (7, 11, 13):
            play(seed)
        seen.append(tally.pack())
    assert seen[0] == seen[1]
    assert tally.counted


def test_a_seed_that_finds_something_is_told_with_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seed: int) -> None:
        assert seed != 25, "planted"

    monkeypatch.setattr(soak_incarnations, "play", broken)
    _, found = play_chunk(20)
    assert list(found) == [25]
    campaign = soak_incarnations.Campaign(found=found, seeds=20)
    text = "\n".join(campaign.lines())
    assert "planted" in text
    assert "soak_incarnations.py --again 25" in text


def test_no_workflow_is_killed_so_often_without_progress_that_it_is_ended() -> None:
    """S39: the limit on activations without progress is right to end what only dies; a soak is about the rest."""
    for seed in range(200):
        rng = random.Random(seed)
        program_of(rng)
        row = 0
        for write, when in disturbance_of(rng).crashes:
            row = row + 1 if write == 0 or (write, when) == (1, "before") else 0
            assert row < 10
