"""The real thing: processes killed with SIGKILL by another process, and an oracle outside of both."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kill9 import campaign


def test_workflows_killed_at_random_until_finished_miss_no_effect_and_have_the_right_results(tmp_path: Path) -> None:
    """S18, S22, S27, S42, S43: in small; the larger run is `python tests/crash/kill9.py --workflows 150`."""
    seed = random.randrange(1_000_000)
    report = campaign(tmp_path, workflows=25, seed=seed, life_s=0.5)
    assert report.problems == [], f"seed {seed}"
    assert report.lives > 3, "it was killed at all"
    assert report.repeated > 0 or report.interrupted > 0, f"seed {seed}: no kill met an effect"
