"""What is built and how a clone sets itself up: pyproject.toml agrees with itself, a Python that works is found."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BUILD = PYPROJECT["tool"]["hatch"]["build"]
APACHE_2_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def find_python(path: str, what: str) -> str:
    """What tools/find-python.sh prints with a PATH of our making, pyenv and uv out of its sight."""
    environment = {"PATH": path, "HOME": os.devnull}
    run = subprocess.run(
        ["/bin/sh", str(ROOT / "tools" / "find-python.sh"), what],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    return run.stdout


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def make_path(directory: Path) -> str:
    """A PATH with the few programs that the script needs, and no Python."""
    tools = directory / "tools"
    tools.mkdir()
    for name in ("awk", "sort", "head", "tail"):
        found = next(Path(part, name) for part in os.environ["PATH"].split(os.pathsep) if Path(part, name).exists())
        (tools / name).symlink_to(found)
    return str(tools)


def test_every_tool_knows_the_same_source_roots() -> None:
    packages = BUILD["targets"]["wheel"]["packages"]
    roots = [path.removesuffix("/perdure") for path in packages]
    assert packages == [f"{root}/perdure" for root in roots]
    assert sorted({path.parents[2].name for path in ROOT.glob("*/perdure/*/__init__.py")}) == sorted(roots)
    assert BUILD["targets"]["wheel"]["dev-mode-dirs"] == roots
    assert set(roots) <= set(BUILD["targets"]["sdist"]["include"])
    assert PYPROJECT["tool"]["mypy"]["mypy_path"][: len(roots)] == roots
    assert PYPROJECT["tool"]["pyright"]["extraPaths"] == roots
    assert set(roots) <= set(PYPROJECT["tool"]["pyright"]["include"])
    assert set(roots) <= set(PYPROJECT["tool"]["mypy"]["files"])


def test_installed_version_is_the_written_one() -> None:
    assert version("perdure") == PYPROJECT["project"]["version"]


def test_licence_is_the_apache_text_unchanged() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_SHA256


def test_dependency_groups_expand() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "group.py"), "dev"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = run.stdout.splitlines()
    assert set(PYPROJECT["dependency-groups"]["test"]) < set(lines)
    assert any(line.startswith("ruff") for line in lines)


def test_dead_shims_are_passed_over_and_the_working_python_behind_them_is_found(tmp_path: Path) -> None:
    mine = f"{sys.version_info[0]}.{sys.version_info[1]}"
    write_program(tmp_path / "first" / f"python{mine}", "exit 127")
    write_program(tmp_path / "first" / "python3", "exit 127")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / f"python{mine}").symlink_to(sys.executable)
    found = find_python(f"{tmp_path / 'first'}:{tmp_path / 'second'}:{make_path(tmp_path)}", "list")
    lines = found.splitlines()
    assert [line.split()[0] for line in lines] == [platform.python_version()]
    assert Path(lines[0].partition(" ")[2]).is_file()


def test_versions_behind_shims_are_found_and_ordered_by_number(tmp_path: Path) -> None:
    # Stand-ins that answer as an interpreter would; "3.9" must not sort after "3.13", nor a name twice.
    (tmp_path / "shims").mkdir()
    for number in ("3.13.1", "3.12.4", "3.14.0"):
        write_program(tmp_path / "versions" / number / "bin" / "python3", f"echo {number} /opt/python {number}")
    path = f"{tmp_path / 'shims'}:{make_path(tmp_path)}"
    lines = ["3.12.4 /opt/python 3.12.4", "3.13.1 /opt/python 3.13.1", "3.14.0 /opt/python 3.14.0"]
    assert find_python(path, "list").splitlines() == lines
    assert find_python(path, "oldest").splitlines() == lines[:1]
    assert find_python(path, "newest").splitlines() == lines[-1:]


def test_no_python_prints_nothing(tmp_path: Path) -> None:
    assert find_python(make_path(tmp_path), "oldest") == ""
