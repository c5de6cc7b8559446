"""What the kit needs beyond Perdure's own dependencies, and how that is told.

1. `import perdure.testing` loads neither Hypothesis nor pytest. What is built on them says so when it is asked for.
2. The error names the extra, and the command that brings it.
"""

from __future__ import annotations

from perdure.actors import MissingExtraError

__all__ = ["missing_extra"]


def missing_extra(what: str, package: str) -> MissingExtraError:
    """The error for something that cannot be had, as a package is not installed."""
    return MissingExtraError(
        f'{what} needs the package {package}; install it with `pip install "perdure[testing]"`', extra="testing"
    )
