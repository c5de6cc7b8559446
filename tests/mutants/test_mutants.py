"""The known bugs that `make mutants` plants can be planted, in every process, and what pytest says of them is read rightly.

The suite is not run here: a change of the code that leaves a mutant without its place is to be red at once, not at the next
`make mutants`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from mutant import ROOT, Change, Mutant, StaleMutantError, source_of
from mutants import HUNG, MUTANTS, end_of, places, run_pytest, verdict

PLANTED = ROOT / "tests" / "mutants" / "planted"

REQUIRED = {
    "acknowledge-before-commit",
    "consume-and-record-in-two-batches",
    "winner-not-durable-first",
    "alarm-armed-late",
    "dedup-forgotten",
    "evict-message-race",
    "attempts-not-stored",
    "prune-outside-the-batch",
    "loser-history-kept",
    "names-flushed-late",
    "catalog-later-than-file",
    "normal-taken-for-full",
}
"""Those that must be among them."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_fits_the_shipped_code_and_changes_it(mutant: Mutant) -> None:
    for module in mutant.modules:
        source = source_of(module).read_text(encoding="utf-8")
        assert mutant.source(module) != source
        compile(mutant.source(module), module, "exec")


def test_the_list_has_every_required_bug_once_and_says_what_each_breaks() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert set(names) >= REQUIRED
    assert [mutant.name for mutant in MUTANTS if not re.fullmatch(r"S\d+( S\d+)*", mutant.breaks)] == []


def test_no_test_speaks_of_a_mutant() -> None:
    """The ordinary suite catches them; a test that knew of one would prove nothing."""
    names = re.compile("|".join([*(mutant.name for mutant in MUTANTS), "PERDURE_MUTANT"]))
    files = [path for path in (ROOT / "tests").rglob("*.py") if PLANTED.parent not in path.parents]
    assert [path for path in files if names.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("before", ["not there", "in"])
def test_a_change_whose_text_is_not_there_exactly_once_is_an_error(before: str) -> None:
    change = Change("perdure.workflow.sleep", before, "")
    with pytest.raises(StaleMutantError, match=r"perdure\.workflow\.sleep has this (0|\d\d+) times"):
        change.apply(source_of("perdure.workflow.sleep").read_text(encoding="utf-8"))


def run_planted(mutant: Mutant, program: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(PLANTED), "PERDURE_MUTANT": mutant.order()}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_mutant_is_in_a_process_and_in_those_that_it_starts_and_nothing_is_written() -> None:
    change = Change("perdure.storage.wake", '    if state == "sleeping":\n', '    if state == "never":\n')
    mutant = Mutant("for-this-test", "a sleeper is due at once", "S24", (change,))
    ask = 'from perdure.storage.wake import wake_of; print(wake_of("sleeping", 5, wants_mail=False))'
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}], check=True); {ask}"
    source = source_of("perdure.storage.wake")
    before = source.read_bytes()
    assert run_planted(mutant, program).stdout.split() == ["0", "0"]
    assert source.read_bytes() == before
    clean = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    assert clean.stdout == "5\n"


def test_a_mutant_that_does_not_fit_makes_the_import_fail() -> None:
    mutant = Mutant("for-this-test", "none", "S24", (Change("perdure.storage.wake", "not there", ""),))
    done = run_planted(mutant, "import perdure.storage.wake")
    assert done.returncode != 0
    assert "the mutant does not apply" in done.stderr


def test_every_mutant_is_looked_for_in_the_whole_suite() -> None:
    tests = ROOT / "tests"
    suite = {path for path in tests.rglob("test_*.py") if not path.is_relative_to(tests / "mutants")}
    assert {path.name for path in suite} >= {
        "test_race.py",
        "test_file_store.py",
        "test_supervisor.py",
        "test_readme.py",
    }
    for mutant in MUTANTS:
        found = dict(places(mutant))
        tried = [ROOT / path for name in ("namesakes", "scenarios") for path in found.get(name, ())]
        assert tried
        assert len(set(tried)) == len(tried)
        assert suite.issuperset(tried)
        assert found["rest"] == [f"--ignore={path.relative_to(ROOT)}" for path in tried]


def test_the_tests_named_after_a_changed_module_come_first() -> None:
    race = next(mutant for mutant in MUTANTS if mutant.modules == ("perdure.workflow.race",))
    assert next(places(race)) == ("namesakes", ["tests/workflow/test_race.py"])


def test_a_report_is_read_for_the_first_failure_and_for_what_did_not_end() -> None:
    begun = [{"kind": "begun", "test": name, "error": ""} for name in ("one", "two")]
    ended = {"kind": "ended", "test": "one", "error": ""}
    failed = {"kind": "failed", "test": "two", "error": "it was 2"}
    uncollected = {"kind": "uncollected", "test": "three", "error": "SyntaxError"}
    hung = {"kind": "hung", "test": "", "error": HUNG}
    assert verdict([*begun, ended, {**ended, "test": "two"}]) == ("survived", "", "")
    assert verdict([*begun, ended, failed]) == ("caught", "two", "it was 2")
    assert verdict([*begun, ended, hung]) == ("caught", "two", "it did not end")
    assert verdict([*begun, failed, uncollected]) == ("unusable", "three", "SyntaxError")


@pytest.mark.parametrize(
    ("code", "output", "error"),
    [
        (None, "", "pytest was ended after 3600 seconds"),
        (-9, "", "pytest was killed by signal 9: it said nothing"),
        (137, "one\nKilled\n", "pytest ended with exit code 137: Killed"),
        (2, "Interrupted\n", "pytest ended with exit code 2: Interrupted"),
        (2, "Timeout (0:04:00)!\nInterrupted\n", "pytest ended with exit code 2: Interrupted"),
        (1, "", "pytest ended within this test, as if all was well"),
        (0, "", "pytest ended within this test, as if all was well"),
    ],
)
def test_pytest_that_something_else_has_ended_catches_nothing(code: int | None, output: str, error: str) -> None:
    """A test that had begun when the machine, a person or the clock ended pytest says nothing of the mutant."""
    begun = {"kind": "begun", "test": "one", "error": ""}
    assert verdict([begun, *end_of(code, output)]) == ("unusable", "one", error)
    failed = {"kind": "failed", "test": "one", "error": "it was 2"}
    assert verdict([begun, failed, *end_of(code, output)]) == ("caught", "one", "it was 2")


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("time.sleep(600)", "caught", HUNG),
        ("os.kill(os.getpid(), signal.SIGKILL)", "unusable", "pytest was killed by signal 9"),
        ("os._exit(0)", "unusable", "pytest ended within this test"),
        ("pass", "survived", ""),
        ("pytest.skip('not here')", "survived", ""),
    ],
)
def test_a_run_tells_a_test_that_hangs_from_an_end_of_pytest(
    body: str, status: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "HANG_S", 1)
    file = tmp_path / "test_some.py"
    file.write_text(f"import os, pytest, signal, time\ndef test_it():\n    {body}\n", encoding="utf-8")
    found, test, said = verdict(run_pytest([str(file)], None))
    assert found == status
    assert test.endswith("test_it" if status != "survived" else "")
    assert said.startswith(error)
    assert status != "survived" or not said


def test_a_place_that_takes_too_long_is_unusable_even_before_its_first_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "PLACE_S", 1)
    file = tmp_path / "test_some.py"
    file.write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    assert verdict(run_pytest([str(file)], None)) == ("unusable", "", "pytest was ended after 1 seconds")


def test_the_report_of_a_run_says_what_began_passed_and_failed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n", encoding="utf-8")
    report = tmp_path / "report"
    environment = os.environ | {"PYTHONPATH": str(PLANTED), "PERDURE_MUTANT_REPORT": str(report)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutant_report", "-p", "no:cacheprovider", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    lines = report.read_text(encoding="utf-8").splitlines()
    assert [line.partition('"test"')[0] for line in lines] == [
        '{"kind": "begun", ',
        '{"kind": "passed", ',
        '{"kind": "ended", ',
        '{"kind": "begun", ',
        '{"kind": "failed", ',
        '{"kind": "ended", ',
    ]
    assert "assert 1 == 2" in lines[-2]
