"""The kit without what its extra brings."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hypothesis", "pytest", "_pytest"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import perdure.testing
from perdure.testing import virtual_supervisor
from perdure.actors import MissingExtraError
for name in ("WorkflowMachine", "process_rule", "crash_plans", "ProcessPlan"):
    try:
        getattr(perdure.testing, name)
    except MissingExtraError as error:
        print(error.extra, error)
try:
    perdure.testing.nonsense
except AttributeError as error:
    print(error)
"""


def test_without_hypothesis_the_rest_works_and_what_needs_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    for line in lines[:4]:
        assert line.startswith("testing ")
        assert 'pip install "perdure[testing]"' in line
    assert lines[4] == "module 'perdure.testing' has no attribute 'nonsense'"
