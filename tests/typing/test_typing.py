"""mypy and pyright, both strict, over the files beside this one: what they infer, and what they refuse, is what those say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in HERE.glob("*.py") if path.name != Path(__file__).name)


def check(*command: str) -> str:
    """What a tool printed; it must have found nothing."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_there_is_something_to_check() -> None:
    assert FILES == ["tests/typing/context.py", "tests/typing/host.py", "tests/typing/portal.py"]
    assert all("assert_type" in (ROOT / file).read_text(encoding="utf-8") for file in FILES)


def test_mypy_infers_and_refuses_what_the_files_say(tmp_path: Path) -> None:
    assert "no issues found in 3 source files" in check("mypy", "--cache-dir", str(tmp_path), *FILES)


def test_pyright_infers_and_refuses_what_the_files_say() -> None:
    report = json.loads(check("pyright", "--pythonpath", sys.executable, "--project", str(HERE), "--outputjson"))
    assert report["summary"]["filesAnalyzed"] == len(FILES)
    assert report["generalDiagnostics"] == []
