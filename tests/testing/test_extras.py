"""The kit without what its extra brings."""

from __future__ import annotations

import pickle
import subprocess
import sys

from perdure.actors import MissingExtraError
from perdure.storage import PerdureError
from perdure.testing.extras import missing_extra

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

LOOK = """
import inspect
from perdure.testing import *
assert "virtual_supervisor" in globals()
for found in (globals(), perdure.testing.__all__, dir(perdure.testing), dict(inspect.getmembers(perdure.testing))):
    assert "explore_crashes" in found
    assert not {"WorkflowMachine", "process_rule", "crash_plans", "ProcessPlan"} & {*found}
try:
    from perdure.testing import WorkflowMachine
except ImportError as error:
    print(error)
"""


def test_without_hypothesis_the_rest_works_and_what_needs_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    for line, what in zip(lines, (*2 * ("WorkflowMachine",), *2 * ("drawing examples",)), strict=False):
        assert line.startswith(f"testing {what} needs the package hypothesis; ")
        assert 'pip install "perdure[testing]"' in line
    assert lines[4] == "module 'perdure.testing' has no attribute 'nonsense'"


def test_without_hypothesis_whoever_lists_the_names_gets_those_that_there_are() -> None:
    """A star import and `inspect` work; who imports a name that cannot be had gets an `ImportError`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM + LOOK], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("WorkflowMachine needs the package hypothesis; ")


def test_a_missing_extra_is_an_import_error_and_survives_pickle() -> None:
    error = pickle.loads(pickle.dumps(missing_extra("this", "that")))
    assert isinstance(error, MissingExtraError)
    assert isinstance(error, ImportError)
    assert isinstance(error, PerdureError)
    assert (error.extra, str(error)) == (
        "testing",
        'this needs the package that; install it with `pip install "perdure[testing]"`',
    )
