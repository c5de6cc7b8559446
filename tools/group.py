"""Print the requirements of a dependency group of pyproject.toml, one per line.

`pip install --group` would do, but pip learnt it in 25.1, and none of Python 3.11 to 3.13 comes with a pip that new.
This needs only the standard library.

Usage: python tools/group.py GROUP
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(
    groups: dict[str, list[str | dict[str, str]]], group: str, *, inside: tuple[str, ...] = ()
) -> Iterator[str]:
    """Every requirement of `group`, groups that it includes expanded (PEP 735).

    Raises:
        KeyError: There is no such group.
        ValueError: Groups include one another in a circle.
    """
    if group in inside:
        raise ValueError(f"dependency groups include one another: {' -> '.join((*inside, group))}")
    for item in groups[group]:
        if isinstance(item, str):
            yield item
        else:
            yield from requirements(groups, item["include-group"], inside=(*inside, group))


if __name__ == "__main__":
    table = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    print("\n".join(requirements(table["dependency-groups"], sys.argv[1])))
