"""Every code block of the README and the docs runs, prints what the page says, and the API page is complete.

A page's fences say what happens to them:

    python          joins the page's program, which runs first, as one file
    python NAME     is saved as NAME, in its turn
    sh run          runs in its turn, and has to succeed
    sh killed       runs in its turn, and has to end by SIGKILL
    output          is what the block before it prints (among other lines, in this order)
    sh              is not run: it installs things, or is for another place
    text            is not run: a grammar, or a picture
    bare, hex       a schema, and bytes with an explanation: `test_storage_format.py` runs the one and checks the other
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.actors import Supervisor
from perdure.storage import Store
from perdure.testing import explore_crashes, explore_crashes_now
from perdure.workflow import (
    Context,
    QueueReader,
    WorkflowHandle,
    load_snapshot,
    replay_from_step,
    run_workflow,
    send_message,
    start_workflow,
)

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
API = DOCS / "reference" / "api.md"
KINDS = {"python", "sh", "sh run", "sh killed", "output", "text", "bare", "hex"}
TIMEOUT_S = 60
KILLED = 128 + 9

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"python (\w+\.py)")
# One row of a table whose first cell is code: the name, without its arguments and without "await".
ROW = re.compile(r"^\| `(?:await )?(\w+)(?:\([^|]*\))?` \| (\S[^|]*) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    kind: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(kind.strip(), text) for kind, text in FENCE.findall(page.read_text(encoding="utf-8"))]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(command: list[str], directory: Path, *, status: int = 0) -> str:
    """Run a command where a reader would have `python` and `sqlite-utils` on the path; returns what it printed."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    # A shell that replaces itself with its last command is killed itself, instead of telling of it.
    ended = done.returncode if done.returncode >= 0 else 128 - done.returncode
    assert ended == status, f"{command} ended with {ended}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_printed(printed: str, expected: str) -> str:
    """What is left of the output after the expected part, which must be there."""
    before, found, rest = printed.partition(expected)
    assert found, f"expected this:\n{expected}\nin what was printed:\n{printed}"
    assert before == "" or before.endswith("\n")
    return rest


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_fence_says_what_happens_to_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(page)
    assert 2 * len(blocks) == len(re.findall(r"^```", text, re.MULTILINE)), "a fence is not closed"
    assert [block.kind for block in blocks if block.kind not in KINDS and not NAMED.fullmatch(block.kind)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=page_id)
def test_every_block_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    program = "\n\n".join(block.text for block in blocks if block.kind == "python")
    printed = ""
    if program:
        (tmp_path / "page.py").write_text(program, encoding="utf-8")
        printed = run([sys.executable, "page.py"], tmp_path)
    for block in blocks:
        if block.kind == "output":
            printed = check_printed(printed, block.text)
        elif block.kind == "sh run":
            printed = run(["/bin/sh", "-e", "-c", block.text], tmp_path)
        elif block.kind == "sh killed":
            printed = run(["/bin/sh", "-e", "-c", block.text], tmp_path, status=KILLED)
        elif named := NAMED.fullmatch(block.kind):
            (tmp_path / named[1]).write_text(block.text, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    inside = [link for link in links if not link.startswith("https://")]
    assert [link for link in inside if not (page.parent / link).exists()] == []


def test_the_index_names_every_page() -> None:
    links = set(re.findall(r"\]\(([^)]+)\)", (DOCS / "index.md").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}
    assert {page for page in pages if page not in links and f"{Path(page).parent}/" not in links} == set()


def section(title: str) -> str:
    """The text under a heading of the API page, as far as the next heading of its level or above."""
    level = title.partition(" ")[0]
    text = API.read_text(encoding="utf-8")
    match = re.search(rf"^{re.escape(title)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"{title!r} is missing"
    return match[1]


@pytest.mark.parametrize(
    "package", ["perdure.actors", "perdure.actors.portal", "perdure.workflow", "perdure.storage", "perdure.testing"]
)
def test_the_api_page_lists_exactly_what_is_exported(package: str) -> None:
    top = section(f"## {package}").partition("\n### ")[0]
    listed = [name for name, _ in ROW.findall(top)]
    exported = importlib.import_module(package).__all__
    assert (set(exported) - set(listed), set(listed) - set(exported)) == (set(), set()), (
        "exported and not listed, or listed only"
    )
    assert len(listed) == len(set(listed))


def members_listed(kind: type) -> set[str]:
    return {name for name, _ in ROW.findall(section(f"### {kind.__name__}"))}


def members(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", [Context, QueueReader, WorkflowHandle, Store], ids=lambda kind: kind.__name__)
def test_the_api_page_lists_every_public_member(kind: type) -> None:
    assert members_listed(kind) == members(kind)


def test_the_api_page_lists_no_member_that_the_supervisor_lacks() -> None:
    """Some of its methods are there for handles; those for users are listed."""
    assert {"spawn", "get"} <= members_listed(Supervisor) <= members(Supervisor)


def arguments_listed(name: str, text: str) -> list[str]:
    described = re.search(rf"^\| `await {name}\(([^`]*)\)`", text, re.MULTILINE)
    assert described
    listed = [part.strip().lstrip("*").partition("=")[0] for part in described[1].split(",")]
    return [argument for argument in listed if argument]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Context, "step"),
        (Context, "loop"),
        (QueueReader, "next"),
        (QueueReader, "next_batch"),
        (Supervisor, "spawn"),
        (Supervisor, "schedule"),
    ],
)
def test_the_api_page_names_every_argument(kind: type, name: str) -> None:
    arguments = [argument for argument in inspect.signature(getattr(kind, name)).parameters if argument != "self"]
    assert arguments_listed(name, section(f"### {kind.__name__}")) == arguments


@pytest.mark.parametrize(
    "function",
    [run_workflow, start_workflow, send_message, load_snapshot, replay_from_step],
    ids=lambda function: function.__name__,
)
def test_the_api_page_names_every_argument_of_the_engine(function: Callable[..., object]) -> None:
    listed = arguments_listed(function.__name__, section("## perdure.workflow"))
    assert listed == list(inspect.signature(function).parameters)


def test_the_api_page_names_every_argument_of_an_exploration() -> None:
    listed = arguments_listed("explore_crashes", section("## perdure.testing"))
    assert listed == list(inspect.signature(explore_crashes).parameters)
    assert listed == list(inspect.signature(explore_crashes_now).parameters)
