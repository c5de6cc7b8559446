"""Plants a mutant in this process: Python imports a module of this name at its start, if it is on PYTHONPATH.

So a mutant is in every process that a test starts as well, be it killed, an example, or the soak. The module to be changed
is compiled from changed source as it is imported; no file is written, not even of bytecode. A change that does not apply
makes the import an error, which `mutants.py` has excluded before.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


class _Loader(SourceFileLoader):
    """Loads one module with changes."""

    def __init__(self, fullname: str, path: str, changes: list[tuple[str, str]]) -> None:
        super().__init__(fullname, path)
        self._changes = changes

    def get_code(self, fullname: str) -> CodeType:
        """Compile the changed source; what is cached is of the unchanged."""
        path = self.get_filename(fullname)
        source = self.get_data(path).decode()
        for before, after in self._changes:
            if source.count(before) != 1:
                raise ImportError(f"the mutant does not apply to {path}")
            source = source.replace(before, after)
        return compile(source, path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the modules that are to be changed."""

    def __init__(self, changes: list[list[str]]) -> None:
        self._changes: dict[str, list[tuple[str, str]]] = {}
        for module, before, after in changes:
            self._changes.setdefault(module, []).append((before, after))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's usual place, with a loader that changes it."""
        changes = self._changes.get(fullname)
        if changes is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, changes)
        return spec


if _order := os.environ.get("PERDURE_MUTANT"):
    sys.meta_path.insert(0, _Finder(json.loads(_order)["changes"]))
