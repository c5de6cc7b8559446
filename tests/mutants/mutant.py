"""What a mutant is: a known bug, as an exact change of the shipped code.

1. A change is text that is in its module exactly once, and what to put in its place. Where the text is gone, or there
   twice, the mutant is stale, and that is an error and never a mutant that is not planted.
2. Nothing is written into the tree: the changed module is compiled where it is imported (`planted/sitecustomize.py`), in
   every process that the tests start.
3. A mutant says what is wrong and which scenarios it breaks. It does not say which test is to see it: no test knows of it.

Rejected: mutants made by rule (`<` for `<=`), which are many, mostly harmless, and none of the bugs that durable engines
have had.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Change", "Mutant", "StaleMutantError", "source_of"]

ROOT = Path(__file__).resolve().parents[2]


class StaleMutantError(Exception):
    """The code that a mutant changes is not what it was; change the mutant with it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One edit of one module.

    Attributes:
        module: Its dotted name.
        before: Text that is in it exactly once.
        after: What is put in its place.
    """

    module: str
    before: str
    after: str

    def apply(self, source: str) -> str:
        """The module's source with the bug.

        Raises:
            StaleMutantError: The text to be changed is not there, or more than once.
        """
        found = source.count(self.before)
        if found != 1:
            raise StaleMutantError(f"{self.module} has this {found} times instead of once:\n{self.before}")
        return source.replace(self.before, self.after)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A known bug.

    Attributes:
        name: What it is called on the command line.
        bug: What is wrong, in one line.
        breaks: The scenarios that do not hold with it, as `S27 S39`.
        changes: How it is planted.
    """

    name: str
    bug: str
    breaks: str
    changes: tuple[Change, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that it changes, each once, in order."""
        return tuple(dict.fromkeys(change.module for change in self.changes))

    def source(self, module: str) -> str:
        """The source of a module with this bug.

        Raises:
            StaleMutantError: It cannot be planted any more.
        """
        source = source_of(module).read_text(encoding="utf-8")
        for change in self.changes:
            if change.module == module:
                source = change.apply(source)
        return source

    def order(self) -> str:
        """What `planted/sitecustomize.py` is told, in the environment variable PERDURE_MUTANT."""
        changes = [[change.module, change.before, change.after] for change in self.changes]
        return json.dumps({"name": self.name, "changes": changes})


def source_of(module: str) -> Path:
    """The file of a shipped module."""
    layer = module.split(".")[1]
    return ROOT / layer / Path(*module.split(".")).with_suffix(".py")
