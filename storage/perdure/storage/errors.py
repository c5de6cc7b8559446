"""The errors of the storage layer, and the root of all of Perdure's errors.

1. Every error Perdure raises derives from `PerdureError`, which lives in the lowest layer so that all layers share it.
2. Every error carries its facts as attributes, survives pickling and says what to do next.
3. A storage error belongs to exactly one of three families, because the engine acts on the family, not on the text:
   *refused* (nothing was written; the caller still holds everything), *unknown* (a commit may or may not have
   happened; the activation ends and history is reloaded), *unusable* (the file cannot be used until someone repairs
   it).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BatchRefusedError",
    "CommitUnknownError",
    "CorruptStoreError",
    "DecodeError",
    "DriverClosedError",
    "EncodeError",
    "FormatVersionError",
    "NamespaceNotFoundError",
    "PerdureError",
    "StorageError",
    "StoreBusyError",
    "StoreLockedError",
    "UnsupportedFileSystemError",
    "ValueTooLargeError",
]


def _rebuild(cls: type[PerdureError], message: str, facts: dict[str, Any]) -> PerdureError:
    return cls(message, **facts)


class PerdureError(Exception):
    """The root of every error that Perdure raises.

    Subclasses take their facts as keyword arguments; each is an attribute of the same name, and the error pickles.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.__dict__.update(facts)
        self._facts = facts

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self._facts))


class StorageError(PerdureError):
    """A driver or a store could not do what was asked. Never a failure of a user's step."""

    path: str | None = None
    """The file it is about, where there is one."""


class BatchRefusedError(StorageError):
    """A batch was refused before anything was written: it may be changed or tried again as it is."""


class ValueTooLargeError(BatchRefusedError):
    """One value, or an atomic batch, is larger than the driver takes."""

    size: int = 0
    limit: int = 0


class CommitUnknownError(StorageError):
    """A commit failed part-way: it may have happened or not. The driver is closed; reopen it and read again."""


class DriverClosedError(StorageError):
    """The driver was used after it was closed, or after a commit of unknown outcome closed it."""


class StoreBusyError(StorageError):
    """The same file is already open, here or in another process; a workflow has one opener at a time."""


class StoreLockedError(StorageError):
    """Another process owns the data directory."""

    holder_pid: int | None = None


class CorruptStoreError(StorageError):
    """A file is not a database, or is a damaged one. It was set aside, not recreated; `set_aside` names where."""

    set_aside: tuple[str, ...] = ()


class NamespaceNotFoundError(StorageError):
    """No namespace exists for this workflow id."""

    workflow_id: str = ""


class FormatVersionError(StorageError):
    """The data was written by a newer Perdure; upgrade Perdure to open it."""

    found: int = 0
    supported: int = 0


class UnsupportedFileSystemError(StorageError):
    """The data directory is on a network file system, where file locks and fsync cannot be relied on."""

    file_system: str = ""


class EncodeError(PerdureError):
    """A value cannot be stored. `path` says where in the value, `type_name` what was found there."""

    path: str = ""
    type_name: str = ""


class DecodeError(PerdureError):
    """Stored bytes are not what their format says. The only error that the decoders raise."""
