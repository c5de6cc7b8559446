"""Check an installed wheel of Perdure: run by .ci/run with the interpreter of a clean environment, outside the tree.

1. Every module of the source tree is in the wheel, and imports with nothing but the runtime dependencies there; but for those
   of the kit for tests that are built on what its extra brings: they say so.
2. Every one is loaded from that environment: an editable install or a stray PYTHONPATH would make the check vacuous.
3. `perdure` stays a namespace: no `__init__.py`, and each portion is typed.

Usage: python -I check_wheel.py TREE
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
import tomllib
from pathlib import Path

TOOLS = ["pytest", "hypothesis", "mypy", "ruff"]
"""What no runtime dependency may bring along."""


def module_name(parts: tuple[str, ...]) -> str:
    """The dotted name of the module in a file, from its path below a source root."""
    path = Path(*parts).with_suffix("")
    return ".".join(path.parent.parts if path.name == "__init__" else path.parts)


def check(tree: Path) -> str:
    """Check everything; what was found, as text.

    Raises:
        AssertionError: The wheel is not what it must be; the message says how.
    """
    pyproject = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    distribution = importlib.metadata.distribution("perdure")
    files = [file for file in distribution.files or [] if file.parts[0] == "perdure" and file.suffix != ".pyc"]
    names = {file.as_posix() for file in files}
    site = Path(str(distribution.locate_file(""))).resolve()

    require(distribution.version == pyproject["project"]["version"], f"its version is {distribution.version}")
    require(site.is_relative_to(Path(sys.prefix).resolve()), f"it is installed in {site}, outside {sys.prefix}")
    require("perdure/__init__.py" not in names, "it has a perdure/__init__.py, so `perdure` is no namespace any more")
    require(any(path.name == "LICENSE" for path in distribution.files or []), "it has no licence text")

    roots = [tree / package for package in pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    source = {
        f"perdure/{path.relative_to(root).as_posix()}" for root in roots for path in root.rglob("*") if is_source(path)
    }
    require(source == names, f"it differs from the tree in {sorted(source ^ names)}")
    packages = sorted({file.parts[1] for file in files})
    untyped = [package for package in packages if f"perdure/{package}/py.typed" not in names]
    require(not untyped, f"py.typed is missing in {untyped}")

    modules = sorted(module_name(file.parts) for file in files if file.suffix == ".py")
    needing: list[str] = []
    for name in modules:
        try:
            origin = importlib.import_module(name).__file__
        except Exception as error:
            require(needs_tool(name, error), f"{name} cannot be imported: {error!r}")
            needing.append(name)
            continue
        require(origin is not None and Path(origin).resolve().is_relative_to(site), f"{name} was loaded from {origin}")
    present = [tool for tool in TOOLS if importlib.util.find_spec(tool) is not None]
    require(not present, f"the environment is not clean: {present}")
    python = platform.python_version()
    count = f"{len(modules)} modules of {len(packages)} packages ({len(needing)} need an extra)"
    return f"perdure {distribution.version}: {count}, Python {python}"


def needs_tool(name: str, error: Exception) -> bool:
    """Whether a module cannot be imported for want of what the extra `testing` brings, and says so."""
    if not name.startswith("perdure.testing."):
        return False
    missing = isinstance(error, ModuleNotFoundError) and error.name in TOOLS
    return missing or (type(error).__name__ == "MissingExtraError" and getattr(error, "extra", None) == "testing")


def is_source(path: Path) -> bool:
    """Whether a file of the tree belongs in the wheel."""
    return path.is_file() and "__pycache__" not in path.parts


def require(condition: bool, complaint: str) -> None:
    """Like `assert`, also under -O."""
    if not condition:
        raise AssertionError(f"the installed wheel is wrong: {complaint}")


if __name__ == "__main__":
    print(check(Path(sys.argv[1]).resolve()))
