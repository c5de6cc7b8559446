"""The shape of the house: which layer may use which, what every package carries, what every exported name explains.

1. Everything but the two import tests is read from source with `ast`, so a violation in a module that no test imports,
   or in a function that no test calls, is seen too.
2. Which source roots exist is asked of pyproject.toml's wheel section: a root that is built is a root that is checked.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCE_ROOTS = [Path(path).parent.name for path in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]

# What each package may import of the others. Nothing may import those at the end.
ALLOWED: dict[str, set[str]] = {
    "storage": set(),
    "workflow": {"storage"},
    "actors": {"storage", "workflow"},
    "testing": {"storage", "workflow", "actors"},
    "inspector": {"storage", "workflow", "actors"},
}

TYPING_ONLY = {"typing_extensions"}
"""What type checkers bring along: no dependency, as it is imported under `TYPE_CHECKING` only, which another test checks."""

HEAVY = [
    "anyio",
    "sqlite_utils",
    "click",
    "tabulate",
    "hypothesis",
    "pytest",
    "_pytest",
    "rich",
    "msgspec",
    "cattrs",
    "pydantic",
    "cronsim",
]
"""What `import perdure.actors` must not load: it is imported on first use, or by tests and tools only."""


@dataclass(frozen=True)
class Module:
    """One source file and its place in the namespace."""

    root: str
    path: Path

    @cached_property
    def name(self) -> str:
        parts = self.path.relative_to(ROOT / self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), filename=str(self.path))

    @cached_property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def resolve(self, node: ast.ImportFrom) -> str:
        """The absolute name of the module that a `from ... import` names."""
        if not node.level:
            return node.module or ""
        base = self.package.split(".")
        base = base[: len(base) - node.level + 1]
        return ".".join([*base, node.module] if node.module else base)

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and absolute name of everything imported, in functions and under TYPE_CHECKING too."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Import(names=names):
                    yield from ((node.lineno, alias.name) for alias in names)
                case ast.ImportFrom(names=names):
                    base = self.resolve(node)
                    yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
                case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                    yield node.lineno, name
                case _:
                    pass


MODULES = [Module(root, path) for root in SOURCE_ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
BY_NAME = {module.name: module for module in MODULES}
each_module = pytest.mark.parametrize("module", MODULES, ids=[module.name for module in MODULES])


def is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and bool(str(node.value.value).strip())


def exported(module: Module) -> list[str]:
    """The literal value of `__all__`, or nothing."""
    for node in module.tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="__all__")], value=value)
                | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value)
            ):
                return list(ast.literal_eval(value))
            case _:
                pass
    return []


def _seen_by_checkers(module: Module) -> list[ast.stmt]:
    """What is under `if TYPE_CHECKING:`: a package that loads its names when they are used has its imports there."""
    guarded = [node for node in module.tree.body if isinstance(node, ast.If)]
    return [
        statement
        for node in guarded
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
    ]


def find_definition(module: Module, name: str, *, seen: frozenset[str] = frozenset()) -> tuple[bool, bool]:
    """Whether `name` is defined in the project, and whether that definition is explained, re-exports followed."""
    body = [*module.tree.body, *_seen_by_checkers(module)]
    found = explained = False
    for index, node in enumerate(body):
        following = body[index + 1] if index + 1 < len(body) else None
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                # Of overloads only one needs to carry the text.
                found, explained = True, explained or ast.get_docstring(node) is not None
            case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)) if (
                target == name
            ):
                found, explained = True, explained or is_text(following)
            case ast.ImportFrom(names=names):
                for alias in names:
                    source = module.resolve(node)
                    if (alias.asname or alias.name) == name and source in BY_NAME and source not in seen:
                        found, explained = find_definition(BY_NAME[source], alias.name, seen=seen | {module.name})
            case _:
                pass
    return found, explained


def test_every_layer_is_there_and_seen() -> None:
    assert set(SOURCE_ROOTS) >= {"storage", "workflow", "actors"}
    assert {f"perdure.{root}" for root in SOURCE_ROOTS} <= set(BY_NAME)


@each_module
def test_imports_point_down_only(module: Module) -> None:
    allowed = {module.root, *ALLOWED[module.root]}
    wrong = [
        f"{module.path.relative_to(ROOT)}:{line} imports {name}"
        for line, name in module.imports()
        if name.split(".")[0] == "perdure" and name.split(".")[1:2] != [] and name.split(".")[1] not in allowed
    ]
    assert wrong == []


@each_module
def test_third_party_imports_are_declared(module: Module) -> None:
    project = PYPROJECT["project"]
    declared = list(project["dependencies"])
    for extra in project.get("optional-dependencies", {}).values():
        declared += extra
    names = {re.split(r"[\s<>=!~;\[]", requirement)[0].replace("-", "_").lower() for requirement in declared}
    used = {name.split(".")[0] for _, name in module.imports()}
    assert used - set(sys.stdlib_module_names) - names - {"perdure"} - TYPING_ONLY == set()


@each_module
def test_what_only_type_checkers_bring_is_imported_for_them_only(module: Module) -> None:
    guarded = {
        name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for name in ast.walk(statement)
    }
    wrong = [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and node not in guarded
        and {(getattr(node, "module", None) or node.names[0].name).split(".")[0]} & TYPING_ONLY
    ]
    assert wrong == []


def test_imports_of_every_form_are_seen() -> None:
    source = "import a.b\ndef f():\n    from perdure.actors import g\nfrom . import h\nfrom ..k import l\n"
    module = Module("workflow", ROOT / "workflow" / "perdure" / "workflow" / "made_up.py")
    module.__dict__["tree"] = ast.parse(source + "importlib.import_module('perdure.storage')\n")
    names = {name for _, name in module.imports()}
    assert names == {"a.b", "perdure.actors.g", "perdure.workflow.h", "perdure.k.l", "perdure.storage"}


def test_namespace_package_has_no_init() -> None:
    assert [root for root in SOURCE_ROOTS if (ROOT / root / "perdure" / "__init__.py").exists()] == []
    assert not (ROOT / "perdure").exists()


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_root_holds_one_typed_package(root: str) -> None:
    held = sorted(path.name for path in (ROOT / root / "perdure").iterdir() if path.name != "__pycache__")
    assert held == [root]
    assert (ROOT / root / "perdure" / root / "__init__.py").is_file()
    assert (ROOT / root / "perdure" / root / "py.typed").is_file()


@each_module
def test_every_module_says_why(module: Module) -> None:
    assert ast.get_docstring(module.tree)


@each_module
def test_every_exported_name_is_defined_and_explained(module: Module) -> None:
    wrong: list[str] = []
    for name in exported(module):
        found, explained = find_definition(module, name)
        if not (found and explained):
            wrong.append(f"{module.name}.{name} {'has no docstring' if found else 'is not defined in the project'}")
    assert wrong == []


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_package_lists_what_it_exports_once(root: str) -> None:
    names = exported(BY_NAME[f"perdure.{root}"])
    assert len(names) == len(set(names))


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_the_host_stays_light() -> None:
    loaded = loaded_by("import perdure.actors")
    assert "perdure.actors" in loaded
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_package_loads_no_layer_above_it(root: str) -> None:
    loaded = loaded_by(f"import perdure.{root}")
    others = set(ALLOWED) - {root} - ALLOWED[root]
    assert [name for name in sorted(others) if f"perdure.{name}" in loaded] == []
