"""The data directory: taken only when it is ours, of a known format and on a disk that can be trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure.storage.directory import (
    FORMAT_VERSION,
    LOCAL_HOST,
    NETWORK_FILE_SYSTEMS,
    DataDirectory,
    Host,
    file_system_of,
)
from perdure.storage.errors import FormatVersionError, StorageError, UnsupportedFileSystemError

MOUNTINFO = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:25 / /mnt/share rw - nfs4 server:/export rw
31 30 0:26 / /mnt/share/local rw - tmpfs tmpfs rw
32 27 0:27 / /mnt/with\\040space rw master:2 propagate_from:1 - fuse.sshfs host:/ rw
33 27 0:28 / /var/lib/data rw - btrfs /dev/vdb rw
34 27 0:29 / /var/lib/data rw - cifs //server/share rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "ext4"),
        ("/home/me/data", "ext4"),
        ("/mnt/share", "nfs4"),
        ("/mnt/share/data", "nfs4"),
        ("/mnt/shared/data", "ext4"),
        ("/mnt/share/local/data", "tmpfs"),
        ("/mnt/with space/x", "fuse.sshfs"),
        ("/var/lib/data/x", "cifs"),
    ],
)
def test_the_mount_that_holds_a_path_is_found(path: str, expected: str) -> None:
    assert file_system_of(path, MOUNTINFO) == expected


def test_without_mounts_nothing_is_known() -> None:
    assert file_system_of("/data", "") is None


def test_this_machine_is_asked_and_its_own_disk_is_fine(tmp_path: Path) -> None:
    kind = LOCAL_HOST.file_system(str(tmp_path / "not" / "there"))
    assert kind not in NETWORK_FILE_SYSTEMS
    DataDirectory(tmp_path / "not" / "there").check()
    assert (tmp_path / "not" / "there").is_dir()


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "glusterfs", "fuse.glusterfs"])
def test_a_network_file_system_is_refused_before_anything_is_made(tmp_path: Path, kind: str) -> None:
    directory = DataDirectory(tmp_path / "data", host=Host(file_system=lambda path: kind))
    with pytest.raises(UnsupportedFileSystemError, match="local disk") as caught:
        directory.check()
    assert caught.value.file_system == kind
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [None, "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "fuseblk", "9p", "apfs"])
def test_a_local_one_is_not(tmp_path: Path, kind: str | None) -> None:
    directory = DataDirectory(tmp_path / "data", host=Host(file_system=lambda path: kind))
    directory.check()
    directory.prepare()
    assert json.loads(directory.format.read_bytes()) == {"format": "perdure", "version": FORMAT_VERSION}


def test_it_is_made_once_and_taken_again(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "data")
    for _ in range(2):
        directory.check()
        directory.prepare()
    assert sorted(path.name for path in directory.path.iterdir()) == ["format", "journal", "workflows"]


@pytest.mark.parametrize("begun", [["lock"], ["lock", "format.new"], ["lost+found"], [".gitkeep"]])
def test_our_own_beginnings_are_taken(tmp_path: Path, begun: list[str]) -> None:
    """A crash before the format was written must not make the directory unusable."""
    for name in begun:
        (tmp_path / name).write_bytes(b"")
    directory = DataDirectory(tmp_path)
    directory.check()
    directory.prepare()
    directory.check()


@pytest.mark.parametrize("name", ["report.docx", "catalog.sqlite", "workflows", ".bashrc"])
def test_a_directory_of_somebody_elses_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(StorageError, match=name.replace(".", r"\.")) as caught:
        DataDirectory(tmp_path).check()
    assert caught.value.path == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_one_of_version_1_becomes_one_of_version_2(tmp_path: Path) -> None:
    """An older Perdure, which would not look into the journal, refuses it from then on; what was there stays."""
    (tmp_path / "format").write_text('{"format": "perdure", "version": 1}\n')
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "a.sqlite").write_bytes(b"a")
    directory = DataDirectory(tmp_path)
    directory.check()
    assert json.loads(directory.format.read_bytes())["version"] == 1, "nothing is changed before there is an owner"
    directory.prepare()
    assert json.loads(directory.format.read_bytes()) == {"format": "perdure", "version": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["format", "journal", "workflows"]
    assert (tmp_path / "workflows" / "a.sqlite").read_bytes() == b"a"


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "format").write_text('{"format": "perdure", "version": 3, "more": true}')
    with pytest.raises(FormatVersionError, match="upgrade Perdure") as caught:
        DataDirectory(tmp_path).check()
    assert (caught.value.found, caught.value.supported) == (3, FORMAT_VERSION)
    assert [path.name for path in tmp_path.iterdir()] == ["format"]


@pytest.mark.parametrize("text", ["", "garbage", "[]", '{"format": "other", "version": 1}', '{"format": "perdure"}'])
def test_a_damaged_format_says_how_to_mend_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "format").write_text(text)
    with pytest.raises(StorageError, match=r'restore the file: \{"format": "perdure", "version": 2\}'):
        DataDirectory(tmp_path).check()


@pytest.mark.parametrize("below", ["data", "data/deeper"])
def test_a_path_through_a_file_is_named(tmp_path: Path, below: str) -> None:
    """S41: what cannot be made is said with its path."""
    (tmp_path / "data").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot use") as caught:
        DataDirectory(tmp_path / below).check()
    assert caught.value.path == str(tmp_path / below)


def test_removing_takes_what_belongs_to_a_file_and_nothing_else(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    directory.check()
    directory.prepare()
    ours = ["a.sqlite", "a.sqlite-wal", "a.sqlite-shm", "a.sqlite.corrupt-1", "a.sqlite.corrupt-1-wal"]
    others = ["b.sqlite", "b.sqlite-wal", "aa.sqlite.corrupt-1"]
    for name in ours + others:
        (directory.workflows / name).write_bytes(b"")
    directory.remove("a.sqlite")
    assert sorted(path.name for path in directory.workflows.iterdir()) == sorted(ours[3:] + others)
    directory.remove("a.sqlite", set_aside=True)
    assert sorted(path.name for path in directory.workflows.iterdir()) == sorted(others)
