"""Running out of file descriptors, told apart from everything else that keeps a file from being opened.

1. It says nothing about the file, so no verdict on one is passed for it: nothing is set aside, marked, removed or
   rebuilt, and the file is as good as before once descriptors are free.
2. The operating system says so with `EMFILE` or `ENFILE`. SQLite only says "unable to open database file", and
   `tempfile` that it found no directory; there, it is found out by opening one descriptor.

Rejected: keeping one descriptor in reserve. It would be spent by the first of thousands of workflows that needs it.
"""

from __future__ import annotations

import os
from errno import EMFILE, ENFILE, ENOENT
from typing import Final

from perdure.storage.errors import StorageError

__all__ = ["OutOfDescriptorsError", "is_exhausted", "out_of_descriptors", "raise_descriptor_limit"]

_EXHAUSTED: Final = frozenset({EMFILE, ENFILE})


class OutOfDescriptorsError(StorageError):
    """The process, or the machine, has no file descriptor left. Nothing is wrong with the file."""


def out_of_descriptors(what: str, error: BaseException, *, path: str) -> OutOfDescriptorsError | None:
    """What to raise instead, if an error came about because no descriptor was left; `None` if it did not.

    Call it before anything is closed, as a descriptor that is free again hides the cause.

    Args:
        what: What cannot be done, for the error's text.
        error: What the operating system or SQLite raised.
        path: The file it is about.
    """
    if not is_exhausted(error):
        return None
    return OutOfDescriptorsError(
        f"{what}: the process has run out of file descriptors, of which each live workflow takes two; raise the limit "
        "(`ulimit -n`) or have fewer workflows live at once",
        path=path,
    )


def is_exhausted(error: BaseException) -> bool:
    """Whether an error came about because no descriptor was left; see `out_of_descriptors`."""
    if isinstance(error, OSError) and error.errno != ENOENT:
        return error.errno in _EXHAUSTED
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as found:
        return found.errno in _EXHAUSTED
    return False


def raise_descriptor_limit() -> int | None:
    """Let this process have as many descriptors as it may; returns how many that are, or `None` for no limit.

    The soft limit is often 1,024 for the sake of programs that use `select`, which Trio does not.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and soft != resource.RLIM_INFINITY:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS refuses more than its kernel's own bound, which it does not tell
            return soft
        soft = hard
    return None if soft == resource.RLIM_INFINITY else soft
