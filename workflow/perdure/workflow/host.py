"""What an operation needs of whoever hosts the workflow; the supervisor implements it (`perdure.actors.hosting`).

1. The engine knows no supervisor. A workflow that is run without one has no host, and operations that need it say so.
2. A host's methods may wait, and end with the activation: they are cancelled when it is closed.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Host"]


class Host(Protocol):
    """The surroundings of a hosted workflow."""
