"""The data directory: what lies in it, which format it has, and whether its disk can be trusted.

    format            the format's version, as JSON; written once, durably, before anything else
    lock              held while a process owns the directory (`process_lock.py`)
    catalog.sqlite    an index over all workflows (`catalog.py`)
    own.sqlite        what belongs to the owner and to no workflow; made when it is first asked for
    workflows/        one SQLite file per workflow (`naming.py` for the names)
    journal/          what is durable of workflows that have no file yet (`journal.py`); empty once the owner is gone in order

1. A directory without `format` is taken only when nothing but our own beginnings is in it, so that a wrong path never
   mixes our files with somebody else's. A newer format is refused before anything is touched.
2. The main file's entry in `workflows/` is the one durable fact on which file of a workflow is current, once it has one. It is
   made with the file complete and synced, and removed before anything else of that file is.
3. Network file systems are refused: their locks and their fsync cannot be relied on. This is known on Linux only;
   elsewhere the type of a file system cannot be had without guessing, and nothing is refused.

Rejected: a manifest file that lists the current files. It is a second truth beside the directory's own, and one more
thing to sync for each new workflow.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from perdure.storage.descriptors import out_of_descriptors
from perdure.storage.errors import FormatVersionError, StorageError, UnsupportedFileSystemError
from perdure.storage.sqlite_image import sync_directory, write_synced

__all__ = ["LOCAL_HOST", "DataDirectory", "Host", "file_system_of"]

FORMAT_VERSION = 2
"""Stored on disk; a larger one is refused."""

# fmt: off
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "davfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
        "nfs4", "orangefs", "panfs", "pvfs2", "smb", "smb2", "smb3", "smbfs",
        "fuse.ceph", "fuse.ceph-fuse", "fuse.cephfs", "fuse.curlftpfs", "fuse.davfs", "fuse.davfs2", "fuse.gcsfuse",
        "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mfs", "fuse.moosefs", "fuse.nfs", "fuse.rclone",
        "fuse.s3fs", "fuse.smbnetfs", "fuse.sshfs",
    }
)
# fmt: on
"""File system types as Linux names them. 9p is not among them: sandboxes use it for the local disk of one machine."""

_OURS = frozenset({"lock", "format.new", "lost+found", ".gitignore", ".gitkeep"})


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def file_system_of(path: str, mountinfo: str) -> str | None:
    """The type of the file system that holds `path`.

    Args:
        path: An absolute path without symbolic links.
        mountinfo: The text of Linux's `/proc/self/mountinfo`.

    Returns:
        The type, such as `ext4` or `fuse.sshfs`; `None` when no mount point contains the path.
    """
    best, found = -1, None
    for line in mountinfo.splitlines():
        mount, separator, source = line.partition(" - ")
        fields = mount.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), fields[4]).rstrip("/")
        # The last of several mounts on one point hides the others.
        if (path == point or path.startswith(point + "/")) and len(point) >= best:
            best, found = len(point), source.split(" ")[0]
    return found


def _file_system(path: str) -> str | None:
    try:
        mountinfo = Path("/proc/self/mountinfo").read_bytes().decode(errors="surrogateescape")
    except OSError:
        return None
    return file_system_of(os.path.realpath(path), mountinfo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a store asks of the machine; tests replace it.

    Attributes:
        file_system: The type of the file system that holds a path, which need not exist; `None` when unknown.
        boot_id: What identifies this start of the machine; `None` when it cannot be known.
        now_ms: The wall clock, in milliseconds since the epoch.
    """

    file_system: Callable[[str], str | None] = _file_system
    boot_id: Callable[[], str | None] = _boot_id
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000


LOCAL_HOST = Host()
"""The machine itself."""


class DataDirectory:
    """The paths of one data directory, and the care for its format."""

    def __init__(self, path: str | os.PathLike[str], *, host: Host = LOCAL_HOST) -> None:
        self.path: Path = Path(os.path.abspath(path))
        self.lock: Path = self.path / "lock"
        self.format: Path = self.path / "format"
        self.catalog: Path = self.path / "catalog.sqlite"
        self.own: Path = self.path / "own.sqlite"
        self.workflows: Path = self.path / "workflows"
        self.journal: Path = self.path / "journal"
        self._host = host

    def check(self) -> None:
        """Look before touching: the file system, a newer format, another's files. Creates an empty directory if needed.

        Raises:
            UnsupportedFileSystemError: It is a network file system.
            FormatVersionError: A newer Perdure wrote it.
            StorageError: It holds something else, or cannot be made or read.
        """
        kind = self._host.file_system(str(self.path))
        if kind in NETWORK_FILE_SYSTEMS:
            raise UnsupportedFileSystemError(
                f"{self.path} is on a network file system ({kind}), where a crash can lose or damage what was saved; "
                "put the data directory on a local disk",
                path=str(self.path),
                file_system=kind,
            )
        with self._errors("use", self.path):
            missing = [path for path in (self.path, *self.path.parents) if not path.is_dir()]
            for path in reversed(missing):
                path.mkdir(exist_ok=True)
                sync_directory(str(path.parent))
            names = {entry.name for entry in self.path.iterdir()}
        if "format" in names:
            self._check_format()
        elif foreign := sorted(names - _OURS):
            raise StorageError(
                f"{self.path} is not a data directory of Perdure (it has {foreign[0]!r} and no file 'format'); "
                "give an empty or a new directory",
                path=str(self.path),
            )

    def prepare(self) -> None:
        """Create what is missing; durable on return. The caller holds the lock.

        Raises:
            FormatVersionError: A newer Perdure wrote it.
            StorageError: Something cannot be made.
        """
        with self._errors("prepare", self.path):
            if not self.format.exists() or self._check_format() < FORMAT_VERSION:
                # One of version 1 differs by having no journal, which its Perdure would not look for.
                new = self.path / "format.new"
                text = json.dumps({"format": "perdure", "version": FORMAT_VERSION}) + "\n"
                write_synced(str(new), text.encode())
                new.replace(self.format)
                sync_directory(str(self.path))
            for directory in (self.workflows, self.journal):
                directory.mkdir(exist_ok=True)
            # Whoever made them may have been killed before this.
            sync_directory(str(self.path))
        self._check_format()

    def has_own(self) -> bool:
        """Whether there is something of the owner's, be it a file that was set aside."""
        with self._errors("read", self.path):
            return any(entry.startswith(self.own.name) for entry in os.listdir(self.path))

    def remove(self, name: str, *, set_aside: bool = False) -> None:
        """Remove a workflow file with all that belongs to it; missing files are not an error.

        The main file's entry goes first and its removal is durable before anything else is touched: after a crash or a
        power cut the namespace is there whole, with its write-ahead log, or it is gone for good. The others may then
        come back after a power cut; nothing reads them without their main file.

        Args:
            name: The file's name in `workflows/`.
            set_aside: Whether damaged copies may lie beside it, which go too. Finding them lists the whole directory. It
                is done anyway when the file itself is missing.

        Raises:
            OSError: A file cannot be removed, or the removal cannot be made durable.
        """
        main = self.workflows / name
        try:
            main.unlink()
        except FileNotFoundError:
            # A driver may have set it aside without the store's knowing.
            set_aside = True
        sync_directory(str(self.workflows))
        others = [self.workflows / (name + suffix) for suffix in ("-wal", "-shm", "-journal")]
        if set_aside:
            with os.scandir(self.workflows) as entries:
                others += [Path(entry.path) for entry in entries if entry.name.startswith(f"{name}.corrupt-")]
        for other in others:
            other.unlink(missing_ok=True)

    def supersede(self, name: str) -> None:
        """Rename a workflow file so that it no longer counts; durable on return.

        Raises:
            OSError: It cannot be renamed.
        """
        (self.workflows / name).rename(self.workflows / f"{name}.superseded")
        sync_directory(str(self.workflows))

    def _check_format(self) -> int:
        with self._errors("read", self.format):
            text = self.format.read_bytes()
        try:
            content: Any = json.loads(text)
        except ValueError:
            content = None
        fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        version = fields.get("version")
        if fields.get("format") != "perdure" or type(version) is not int or version < 1:
            raise StorageError(
                f"{self.format} is damaged or not of Perdure; if the directory is, "
                f'restore the file: {{"format": "perdure", "version": {FORMAT_VERSION}}}',
                path=str(self.format),
            )
        if version > FORMAT_VERSION:
            raise FormatVersionError(
                f"{self.path} has format version {version}, and this Perdure knows up to {FORMAT_VERSION}; "
                "upgrade Perdure to open it",
                path=str(self.format),
                found=version,
                supported=FORMAT_VERSION,
            )
        return version

    @contextmanager
    def _errors(self, verb: str, path: Path) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            where = error.filename or path
            raise out_of_descriptors(f"cannot {verb} {path}", error, path=str(path)) or StorageError(
                f"cannot {verb} {path}: {error.strerror} ({where})", path=str(path)
            ) from error
