"""The examples do what they say: the order survives two kills with one charge, the approval reminds and escalates, the
offer is made without the carriers that fail, the report that is late is a summary, the agent answers once.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
import trio.testing

from perdure.storage import MemoryDriver, ValueContext
from perdure.workflow import TrioClock, WorkflowHandle, WorkflowState, start_workflow

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
DAY_S = 86400.0


def run_example(name: str, *arguments: str, directory: Path, status: int = 0) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


def requests(data: Path) -> list[dict[str, Any]]:
    """What the stand-in payment service was asked."""
    lines = (data / "payment-service.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def told(output: str) -> list[tuple[str, str]]:
    """Who did what, of the account that the order prints."""
    lines = [line.split(maxsplit=2) for line in output.splitlines() if line.startswith("  ")]
    statuses = ("running", "charged", "recorded", "replayed", "received", "waiting", "killed", "completed")
    return [(words[0], words[1]) for words in lines if len(words) == 3 and words[1] in statuses]


def test_the_order_is_killed_twice_and_the_card_is_charged_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    arguments = ("--data", str(data))

    first = run_example("order.py", *arguments, "--crash", "during", directory=tmp_path, status=-signal.SIGKILL)
    assert ("charge-card", "running") in told(first)
    assert [request["charged"] for request in requests(data)] == [True]

    second = run_example("order.py", *arguments, "--crash", "after", directory=tmp_path, status=-signal.SIGKILL)
    assert told(second)[0] == ("charge-card", "running")
    assert "not charged again" in second
    assert [request["charged"] for request in requests(data)] == [True, False]

    third = run_example("order.py", *arguments, directory=tmp_path)
    assert told(third) == [
        ("charge-card", "replayed"),
        ("wait-for-shipment", "received"),
        ("notify-customer", "running"),
        ("notify-customer", "recorded"),
        ("order-123", "completed"),
    ]
    assert "attempts at the charge:      2" in third
    assert "times the card was charged:  1" in third
    assert [request["charged"] for request in requests(data)] == [True, False]
    assert len({request["key"] for request in requests(data)}) == 1

    fourth = run_example("order.py", *arguments, directory=tmp_path)
    assert told(fourth) == [("order-123", "completed")]
    assert "nothing ran in this one" in fourth
    assert len(requests(data)) == 2


def test_the_order_without_a_crash_charges_once_at_the_first_attempt(tmp_path: Path) -> None:
    output = run_example("order.py", "--data", "data", directory=tmp_path)
    assert ("charge-card", "recorded") in told(output)
    assert [request["charged"] for request in requests(tmp_path / "data")] == [True]
    assert "no place left to crash" in run_example(
        "order.py", "--data", "data", "--crash", "during", directory=tmp_path
    )


def test_a_crash_that_does_not_say_when_comes_after_the_charge(tmp_path: Path) -> None:
    output = run_example("order.py", "--crash", directory=tmp_path, status=-signal.SIGKILL)
    assert told(output)[-1] == ("wait-for-shipment", "waiting")
    assert [request["charged"] for request in requests(tmp_path / "demo-data")] == [True]
    assert told(run_example("order.py", directory=tmp_path))[0] == ("charge-card", "replayed")


def test_the_printed_command_looks_into_the_workflow_when_it_is_copied(tmp_path: Path) -> None:
    output = run_example("order.py", "--data", "it's data", directory=tmp_path)
    (command,) = (line for line in output.splitlines() if "kv" in line)
    shown = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    words = shown.stdout.split()
    assert {"charge-card", "wait-for-shipment:count", "notify-customer", "completed", "order-123"} <= set(words)
    again = run_example("order.py", "--data", "it's data", directory=tmp_path)
    assert "nothing ran in this one" in again


@pytest.mark.parametrize("has_old_data", [False, True])
def test_the_demo_runs_from_any_directory_over_old_data(tmp_path: Path, has_old_data: bool) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "demo.sh", tmp_path / "tools")
    if has_old_data:
        (tmp_path / "demo-data").mkdir()
        (tmp_path / "demo-data" / "payment-service.jsonl").write_text("not a ledger\n", encoding="utf-8")
    command = ["/bin/sh", "tools/demo.sh", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(exit status 137: ended by SIGKILL)") == 2
    assert "times the card was charged:  1" in done.stdout
    assert [request["charged"] for request in requests(tmp_path / "demo-data")] == [True, False]


def test_an_approval_that_nobody_answers_reminds_escalates_and_expires(tmp_path: Path) -> None:
    arguments = ("--data", "data", "--patience", "0.02", "--reminders", "1", "--cooling-off", "0.01")
    output = run_example("approval.py", *arguments, directory=tmp_path)
    assert [" ".join(line.split("[")[0].split()) for line in output.splitlines()] == [
        "to lead please approve: a new teapot",
        "to lead reminder 1: a new teapot",
        "to manager nobody answered, please decide: a new teapot",
        "to manager reminder 1: a new teapot",
        "to requester expired",
        "decision: expired",
    ]
    again = run_example("approval.py", "--data", "data", directory=tmp_path)
    assert [line.strip() for line in again.splitlines()] == [
        "approval-1 was started with another request; going on with that one",
        "decision: expired",
    ]


def test_an_answer_ends_the_approval_with_its_comment(tmp_path: Path) -> None:
    arguments = ("--data", "data", "--patience", "50", "--cooling-off", "0.2", "--answer", "rejected")
    output = run_example("approval.py", *arguments, directory=tmp_path)
    assert "rejected by ada (mind the budget)" in output
    assert output.splitlines()[-1] == "  decision: rejected by ada"


def test_schedules_go_on_over_a_restart_and_repeat_nothing(tmp_path: Path) -> None:
    arguments = ("--data", "data", "--seconds", "1.4")
    first, second = (run_example("cron.py", *arguments, directory=tmp_path).splitlines() for _ in range(2))
    assert first[0].startswith("sales-report: every 0.5 s, next at 20")
    reports = [line for line in [*first, *second] if line.startswith("report on sales, due at")]
    assert len(reports) == len(set(reports)) >= 2
    synced = [line for line in [*first, *second] if line.startswith("synced for")]
    assert synced == sorted(set(synced))
    assert synced != []
    assert second[-1].startswith("sync: last at 20")


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def start_approval(nursery: trio.Nursery, driver: MemoryDriver, **changes: object) -> WorkflowHandle:
    request = {"what": "a teapot", "patience": DAY_S, "reminders_max": 2, "cooling_off": 60.0, **changes}
    approval = load_example("approval").approval
    return await start_workflow(nursery, "approval-1", approval, request, driver, clock=TrioClock())


async def test_reminders_come_a_day_apart_until_somebody_answers(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four and a half days of waiting, in virtual time, before the manager answers."""
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        handle = await start_approval(nursery, MemoryDriver())
        await trio.sleep(4.5 * DAY_S)
        await handle.message("approved", "grace", id="answer")
        assert await handle.result() == "approved by grace"
    assert trio.current_time() - began == pytest.approx(4.5 * DAY_S + 60)
    texts = [" ".join(line.split("[")[0].split()) for line in capsys.readouterr().out.splitlines()]
    assert texts == [
        "to lead please approve: a teapot",
        "to lead reminder 1: a teapot",
        "to lead reminder 2: a teapot",
        "to manager nobody answered, please decide: a teapot",
        "to manager reminder 1: a teapot",
        "to requester approved by grace",
    ]


async def test_a_stop_does_not_start_the_patience_again(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A deadline that passed while the program was stopped has passed."""
    driver = MemoryDriver()
    async with trio.open_nursery() as nursery:
        handle = await start_approval(nursery, driver, reminders_max=0)
        await trio.sleep(0.5 * DAY_S)
        await handle.evict()
    await trio.sleep(0.6 * DAY_S)
    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        handle = await start_approval(nursery, driver, reminders_max=0)
        await trio.sleep(1)
        assert await handle.get_state() is WorkflowState.SLEEPING
        assert "nobody answered" in capsys.readouterr().out
        assert await handle.result() == "expired"
        assert trio.current_time() - began == pytest.approx(DAY_S + 60)


def lines_of(output: str) -> list[str]:
    """What was printed, without the alignment."""
    return [" ".join(line.split()) for line in output.splitlines()]


def test_an_offer_is_made_without_the_carrier_that_refused(tmp_path: Path) -> None:
    lines = lines_of(run_example("fan_out.py", "--depot", "up", directory=tmp_path))
    assert lines[-3:] == [
        "offer-1 completed slow-and-steady for 640 cents, 3 in stock",
        "light-wings left out 2.5 kg are too heavy for us",
        "requests made depot 1, light-wings 1, north-express 1, slow-and-steady 1",
    ]


def test_an_offer_that_failed_is_recovered_and_asks_only_what_failed(tmp_path: Path) -> None:
    """S17, S30, S36: the join's error names the branch; what the other branches have is not asked for again."""
    lines = lines_of(run_example("fan_out.py", directory=tmp_path))
    failed = next(number for number, line in enumerate(lines) if line.startswith("offer-1 failed"))
    assert sorted(lines[: failed - 1]) == [
        "depot asked no answer",
        "depot asked no answer",
        "light-wings asked refused",
        "north-express asked 1290 cents",
        "slow-and-steady asked 640 cents",
    ]
    assert lines[failed - 1].startswith("depot failed StepExhaustedError: ")
    assert lines[failed:] == [
        "offer-1 failed JoinError",
        "somebody repairs the depot, and calls recover()",
        "depot asked 3 of teapot",
        "offer-1 completed slow-and-steady for 640 cents, 3 in stock",
        "light-wings left out 2.5 kg are too heavy for us",
        "requests made depot 3, light-wings 1, north-express 1, slow-and-steady 1",
    ]
    again = lines_of(run_example("fan_out.py", directory=tmp_path))
    assert again[-1] == "requests made none, it was completed by an earlier run"


def test_a_report_that_is_late_is_a_summary_and_its_work_is_cancelled_and_forgotten(tmp_path: Path) -> None:
    """S29: the loser's step is really cancelled, and nothing of it is left in history."""
    summary = [
        "readers get: a summary",
        "recorded:",
        "write-in-time race",
        "write-in-time > deadline > limit sleep",
        "summarise step",
    ]
    arguments = ("--page", "50", "--limit", "0.05")
    lines = lines_of(run_example("deadline.py", *arguments, directory=tmp_path))
    assert lines == ["page 1: cancelled half-way", "summary: written", *summary]
    assert lines_of(run_example("deadline.py", *arguments, directory=tmp_path)) == summary
    lines = lines_of(run_example("deadline.py", directory=tmp_path))
    assert lines == ["report-1 was started with another request; going on with that one", *summary]


def test_a_report_that_is_ready_in_time_forgets_its_deadline(tmp_path: Path) -> None:
    lines = lines_of(run_example("deadline.py", "--page", "0.01", "--limit", "50", "--pages", "2", directory=tmp_path))
    assert lines == [
        "page 1: written",
        "page 2: written",
        "readers get: a report of 2 pages",
        "recorded:",
        "write-in-time race",
        "write-in-time > write > page-1 step",
        "write-in-time > write > page-2 step",
    ]


async def start_report(nursery: trio.Nursery, driver: MemoryDriver) -> WorkflowHandle:
    request = {"pages": 3, "page_takes": 10.0, "limit": 25.0}
    return await start_workflow(
        nursery, "report-1", load_example("deadline").report, request, driver, clock=TrioClock()
    )


async def test_the_deadline_comes_when_the_first_run_said_though_the_work_begins_anew(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """S24, S29: a stop gives the work no more time, and what was written before it is kept."""
    driver = MemoryDriver()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        handle = await start_report(nursery, driver)
        await trio.sleep(18)
        await handle.evict()
    async with trio.open_nursery() as nursery:
        handle = await start_report(nursery, driver)
        assert await handle.result() == "a summary"
        assert trio.current_time() - began == pytest.approx(25)
    assert lines_of(capsys.readouterr().out) == [
        "page 1: written",
        "page 2: cancelled half-way",
        "page 2: cancelled half-way",
        "summary: written",
    ]


BOOKED_TWICE = [
    "flight book Lisbon -> flight-1",
    "hotel book Lisbon -> hotel-2",
    "bank refuse 48900 cents",
    "hotel cancel hotel-2 -> hotel-3",
]


def test_a_trip_that_cannot_be_paid_is_undone_last_booking_first(tmp_path: Path) -> None:
    """S35: and is booked anew, under other keys, once it is recovered (S36)."""
    assert lines_of(run_example("saga.py", directory=tmp_path)) == [
        *BOOKED_TWICE,
        "flight cancel flight-1 -> flight-4",
        "trip-1 failed: the card was refused",
        "flight undone",
        "hotel undone",
        "pay exhausted",
    ]
    assert lines_of(run_example("saga.py", "--card", "ok", directory=tmp_path)) == [
        "flight book Lisbon -> flight-5",
        "hotel book Lisbon -> hotel-6",
        "bank charge 48900 cents -> bank-7",
        "mail confirm flight-5 and hotel-6 and bank-7",
        "trip-1 booked: flight-5, hotel-6, bank-7",
        "flight completed",
        "hotel completed",
        "pay completed",
        "confirm completed",
    ]


def test_a_trip_that_is_killed_while_it_is_undone_is_undone_by_the_next_process(tmp_path: Path) -> None:
    """S35: the cancellation that was not recorded is asked for once more, under the same key."""
    killed = run_example("saga.py", "--crash", directory=tmp_path, status=-signal.SIGKILL)
    assert lines_of(killed) == BOOKED_TWICE
    assert lines_of(run_example("saga.py", directory=tmp_path))[:3] == [
        "hotel cancel hotel-2 -> hotel-3 (known already)",
        "flight cancel flight-1 -> flight-5",
        "trip-1 failed: the card was refused",
    ]
    assert "trip-1 booked" in run_example("saga.py", "--card", "ok", directory=tmp_path)


def test_the_key_is_rotated_under_a_payout_and_its_account_is_in_no_file(tmp_path: Path) -> None:
    output = run_example("encryption.py", directory=tmp_path)
    assert output.splitlines() == [
        "with the old key:",
        "  reserved for account DE02 1203 0000 0000 2020 51",
        "with the new key alone:",
        "  refused: the input of payout-7 cannot be decoded",
        "with both, the new one in front:",
        "  result: reservation for DE02 1203 0000 0000 2020 51, approved by Ada",
        "in the files:",
        "  the account:    not found",
        "  the step's name: found",
    ]


def test_the_vault_binds_values_to_their_workflow_and_kind_and_grows_them_by_what_it_states() -> None:
    module = load_example("encryption")
    vault = module.Vault([bytes(32)])
    coded = vault.encode(b"data", ValueContext("w", "step"))
    assert len(coded) == len(b"data") + vault.overhead_bytes
    assert module.Vault([bytes(31) + b"1", bytes(32)]).decode(coded, ValueContext("w", "step")) == b"data"
    for context in (ValueContext("v", "step"), ValueContext("w", "loop")):
        with pytest.raises(ValueError, match="another value's"):
            vault.decode(coded, context)
    with pytest.raises(ValueError, match="was changed"):
        vault.decode(coded[:-1] + bytes([coded[-1] ^ 1]), ValueContext("w", "step"))
    with pytest.raises(LookupError, match="no key with the id"):
        module.Vault([bytes(31) + b"1"]).decode(coded, ValueContext("w", "step"))


CONVERSATION = [
    "user: Hello?",
    "agent: Which order do you mean? (That was question 1.)",
    "user: Where is order 17?",
    "agent: I see that order 17 is on its way.",
    "user: I want a refund for order 17.",
]


def desk(data: Path) -> list[dict[str, Any]]:
    """What the manager was asked, and what was paid."""
    return [json.loads(line) for line in (data / "desk.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_agent_that_was_killed_answers_the_same_questions_the_same_and_refunds_once(tmp_path: Path) -> None:
    """S28: requests are asked again by their ids, in two further processes; the second finds only replies."""
    data = tmp_path / "data"
    arguments = ("--data", str(data))
    killed = run_example("agent.py", *arguments, "--crash", directory=tmp_path, status=-signal.SIGKILL)
    assert lines_of(killed)[:5] == CONVERSATION
    first = lines_of(run_example("agent.py", *arguments, directory=tmp_path))
    assert first[:5] == CONVERSATION
    [receipt] = [line["receipt"] for line in desk(data) if "refunded" in line]
    assert first[5:] == [
        f"agent: I see that order 17 was refunded, receipt {receipt}.",
        "user: Thanks!",
        "agent: You are welcome.",
        "agent: Goodbye.",
        "the agent stopped",
    ]
    before = desk(data)
    assert lines_of(run_example("agent.py", *arguments, directory=tmp_path)) == first
    assert desk(data) == before
    assert len({line["key"] for line in before if "asked" in line}) == 1


@pytest.mark.parametrize(
    ("manager", "answer"),
    [
        ("rejects", "I see that the refund of order 17 was rejected."),
        ("sleeps", "I see that nobody decided on the refund of order 17 in time."),
    ],
)
def test_the_agent_pays_nothing_without_a_persons_consent(manager: str, answer: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    arguments = ("--data", str(data), "--manager", manager, "--patience", "0.2" if manager == "sleeps" else "60")
    lines = lines_of(run_example("agent.py", *arguments, directory=tmp_path))
    assert f"agent: {answer}" in lines
    assert [line for line in desk(data) if "refunded" in line] == []


async def test_the_agent_sums_up_when_nobody_asks_for_a_while_and_waits_without_end_after_that(
    autojump_clock: trio.testing.MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In virtual time: its memory is one turn then, and it keeps on answering."""
    module = load_example("agent")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where its annotations are looked up
    persona = {"name": "Ada", "desk": str(tmp_path / "desk"), "patience": 60.0, "booking": 1.0, "idle": 3600.0}
    driver = MemoryDriver()
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(nursery, "agent-1", module.agent, persona, driver, clock=TrioClock())
        assert await handle.request("ask", "Hello?", timeout=60) == "Which order do you mean? (That was question 1.)"
        await trio.sleep(2 * 3600)
        summaries = [entry for entry in await handle.history() if "sum-up" in entry.path]
        assert len(summaries) == 1
        await trio.sleep(300 * DAY_S)
        assert await handle.request("ask", "Hello?", timeout=60) == "Which order do you mean? (That was question 1.)"
        assert len([entry for entry in await handle.history() if "sum-up" in entry.path]) == 1
        assert await handle.request("stop", timeout=60) == "Goodbye."
        assert await handle.result() == "stopped"


CHILDREN_DONE = [
    "order-1 lamp delivered",
    "order-1 piano refunded, it is too heavy",
    "order-1 book delivered",
    "ledger 6800 cents",
    "book completed",
    "lamp completed",
    "piano failed",
]


def test_each_parcel_is_a_child_and_one_that_fails_is_refunded(tmp_path: Path) -> None:
    lines = lines_of(run_example("children.py", directory=tmp_path))
    assert sorted(lines[:2]) == ["book packed", "lamp packed"]
    assert lines[2:] == CHILDREN_DONE


def test_parcels_and_messages_go_on_after_a_kill_and_nothing_is_done_twice(tmp_path: Path) -> None:
    """S43: what the order had called, and what was sent to the ledger, are there once."""
    killed = lines_of(run_example("children.py", "--crash", directory=tmp_path, status=-signal.SIGKILL))
    again = lines_of(run_example("children.py", directory=tmp_path))
    assert killed[-1] == "process killed"
    assert sorted({*killed[:-1], *again[: -len(CHILDREN_DONE)]}) == ["book packed", "lamp packed"]
    assert again[-len(CHILDREN_DONE) :] == CHILDREN_DONE


def run_shop_tests(directory: Path, *, has_bug: bool) -> tuple[int, str]:
    """Run the tests of examples/tested_order as the project of its own that it is, without any plugin for async tests."""
    shop = directory / "tested_order"
    shutil.copytree(EXAMPLES / "tested_order", shop, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["-q", "-W", "error", "-p", "no:trio", "-p", "no:anyio", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if name != "TESTED_ORDER_BUG"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=shop,
        env=environment | ({"TESTED_ORDER_BUG": "1"} if has_bug else {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_tested_order_passes_its_tests(tmp_path: Path) -> None:
    status, printed = run_shop_tests(tmp_path, has_bug=False)
    assert status == 0, printed
    assert "3 passed" in printed


def test_the_tested_order_s_planted_bug_is_found_and_the_docs_tell_its_story(tmp_path: Path) -> None:
    """S39: the story in docs/how-to/test-your-workflows.md is the one that pytest prints."""
    status, printed = run_shop_tests(tmp_path, has_bug=True)
    assert status == 1, printed
    assert "3 failed" in printed
    page = (ROOT / "docs" / "how-to" / "test-your-workflows.md").read_text(encoding="utf-8")
    story = page.partition("```text\n")[2].partition("```")[0]
    assert story.startswith("order does not survive a crash")
    errors = [line.removeprefix("E").strip() for line in printed.splitlines() if line.startswith("E ")]
    told = "\n".join(line for line in errors if line).replace("perdure.testing.errors.RecoveryDiffersError: ", "")
    assert "\n".join(line.strip() for line in story.splitlines() if line) in told
    line = ast.parse(story.splitlines()[-1].strip().removeprefix("await "))
    test_file = ast.parse((EXAMPLES / "tested_order" / "test_shop.py").read_text(encoding="utf-8"))
    imported = {name.name for node in test_file.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert {node.id for node in ast.walk(line) if isinstance(node, ast.Name)} <= imported, "it runs where it is pasted"
