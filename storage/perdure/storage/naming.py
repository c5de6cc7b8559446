"""File names for workflow ids.

1. A name is `<slug>-<hash>.<incarnation>.sqlite`. The hash (128 bits, of the id's exact UTF-8 bytes) tells ids apart,
   on file systems that fold case or normalise text too; the slug is only for people.
2. No character of an id reaches the file system unless it is one of `a-z`, `0-9`. Nothing can leave the directory.
3. Incarnations only grow. An id that is used again after a deletion gets a name that no earlier file had, so a
   write-ahead log that outlived its database is never replayed into the new one.

Rejected: escaping the id itself. Ids may have 10,000 characters and differ by case alone; names may not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

from perdure.storage.errors import StorageError

__all__ = [
    "FileName",
    "WorkflowIdError",
    "check_workflow_id",
    "file_name",
    "is_unknown_id",
    "name_stem",
    "parse_file_name",
    "unknown_id",
]

SLUG_CHARS_MAX = 40
HASH_BYTES = 16
COUNTER_BITS = 32

_UNSAFE = re.compile(r"[^a-z0-9]+")
_NAME = re.compile(r"(?P<stem>(?:[a-z0-9][a-z0-9-]{0,39}-)?[0-9a-f]{32})\.(?P<incarnation>[0-9a-f]{16})\.sqlite")


class WorkflowIdError(StorageError, ValueError):
    """A workflow id is empty, is not text, or has characters that UTF-8 cannot hold."""

    workflow_id: str = ""


@dataclass(frozen=True, slots=True, order=True)
class FileName:
    """A parsed file name.

    Attributes:
        stem: Slug and hash: the same for every file that a given id ever had.
        incarnation: Which of them it is; the larger is the later.
    """

    stem: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.stem}.{self.incarnation:016x}.sqlite"

    @property
    def session(self) -> int:
        """The session (see `ProcessLock`) that made the file."""
        return self.incarnation >> COUNTER_BITS


def check_workflow_id(workflow_id: str) -> None:
    """Refuse what cannot name a workflow.

    Raises:
        WorkflowIdError: It is empty, or holds a lone surrogate.
    """
    if not workflow_id:
        raise WorkflowIdError('a workflow id cannot be empty; give each workflow a name such as "order-123"')
    try:
        workflow_id.encode()
    except UnicodeEncodeError as error:
        raise WorkflowIdError(
            f"the workflow id {workflow_id!r:.200} has a lone surrogate at {error.start}, which no file can hold; "
            "use text that encodes to UTF-8",
            workflow_id=workflow_id,
        ) from None


def name_stem(workflow_id: str) -> str:
    """The part of a file name that depends on the id alone: at most 73 characters of `[a-z0-9-]`."""
    slug = _UNSAFE.sub("-", workflow_id[: 4 * SLUG_CHARS_MAX].lower()).strip("-")[:SLUG_CHARS_MAX]
    # An id that was not checked is hashed too, so that it can be said where its file would be.
    digest = blake2b(workflow_id.encode(errors="surrogatepass"), digest_size=HASH_BYTES).hexdigest()
    return f"{slug}-{digest}" if slug else digest


def file_name(workflow_id: str, *, session: int, count: int) -> str:
    """The name of a new file.

    Args:
        workflow_id: A checked workflow id.
        session: The owner's session, 1 to 2**32 - 1.
        count: How many files the session made before, 0 to 2**32 - 1.
    """
    assert 0 < session < 1 << COUNTER_BITS
    assert 0 <= count < 1 << COUNTER_BITS
    return str(FileName(name_stem(workflow_id), session << COUNTER_BITS | count))


def parse_file_name(name: str) -> FileName | None:
    """The parts of a database's file name, or `None` for any other name (its WAL, a set-aside copy, a temporary)."""
    match = _NAME.fullmatch(name)
    return None if match is None else FileName(match["stem"], int(match["incarnation"], 16))


def unknown_id(file: str) -> str:
    """The id under which a file is listed whose workflow cannot be known: `?` and the file's name."""
    return "?" + file


def is_unknown_id(workflow_id: str) -> bool:
    """Whether an id is one that `unknown_id` made; no workflow can be made under it."""
    return workflow_id.startswith("?") and parse_file_name(workflow_id[1:]) is not None
