"""Known bugs of storage under durable engines, planted in ours (`perdure.storage`)."""

from __future__ import annotations

from typing import Final

from mutant import Change, Mutant

__all__ = ["STORAGE_MUTANTS"]


def _in(module: str, before: str, after: str) -> Change:
    return Change(f"perdure.storage.{module}", before, after)


STORAGE_MUTANTS: Final = (
    Mutant(
        "normal-taken-for-full",
        'a file that is opened with `durability="full"` is at SQLite\'s NORMAL',
        "S40",
        (
            _in(
                "sqlite_connection",
                '    level = 2 if durability == "full" else 1\n',
                "    level = 1\n",
            ),
        ),
    ),
    Mutant(
        "batch-is-no-transaction",
        "the deletions of a batch are committed before its puts",
        "S38 S39 S40",
        (
            _in(
                "sqlite_namespace",
                "            if batch.puts:\n                _put(connection, batch.puts)\n",
                "            if batch.puts:\n                if batch.deletes:\n"
                '                    execute("COMMIT")\n                    execute("BEGIN IMMEDIATE")\n'
                "                _put(connection, batch.puts)\n",
            ),
        ),
    ),
    Mutant(
        "alarm-outside-the-batch",
        "the alarm of a batch is written after its commit",
        "S24 S38 S40",
        (
            _in(
                "sqlite_namespace",
                "            if batch.alarm is not None:\n                stored = alarm_value(batch.alarm)\n",
                "            if batch.alarm is not None:\n"
                '                execute("COMMIT")\n                execute("BEGIN IMMEDIATE")\n'
                "                stored = alarm_value(batch.alarm)\n",
            ),
            _in(
                "sqlite_namespace",
                " or len(batch.puts) > _PUTS_MAX:",
                " or len(batch.puts) > _PUTS_MAX or batch.alarm:",
            ),
        ),
    ),
    Mutant(
        "failed-commit-is-refused",
        "a COMMIT that failed is taken for one that wrote nothing, and the connection is used on",
        "S21 S41",
        (
            _in(
                "sqlite_namespace",
                "        doubtful = phase is _Phase.COMMIT or (phase is _Phase.STATEMENT and fault is Fault.UNKNOWN)\n",
                "        doubtful = phase is _Phase.STATEMENT and fault is Fault.UNKNOWN\n",
            ),
        ),
    ),
    Mutant(
        "directory-not-synced",
        "the entry of a new file is not made durable in its directory",
        "S40",
        (
            _in(
                "sqlite_image",
                "                os.unlink(each)\n    sync_directory(os.path.dirname(real_path))\n",
                "                os.unlink(each)\n",
            ),
        ),
    ),
    Mutant(
        "new-file-not-synced",
        "the content of a new file is not made durable before it gets its name",
        "S40",
        (
            _in(
                "sqlite_image",
                "        write_synced(new, _image())\n",
                '        with open(new, "wb") as file:\n            file.write(_image())\n',
            ),
        ),
    ),
    Mutant(
        "removal-not-synced",
        "a deleted workflow's log is removed before it is durable that its file is gone",
        "S40 S52",
        (
            _in(
                "directory",
                "            set_aside = True\n        sync_directory(str(self.workflows))\n",
                "            set_aside = True\n",
            ),
        ),
    ),
    Mutant(
        "lock-released-before-close",
        "the lock of the data directory is released before the files are closed",
        "S42",
        (
            _in(
                "file_store",
                "        problems: list[StorageError] = []\n        with trio.CancelScope(shield=True):\n",
                "        problems: list[StorageError] = []\n        lock.release()\n"
                "        with trio.CancelScope(shield=True):\n",
            ),
        ),
    ),
    Mutant(
        "lock-is-shared",
        "two processes can hold the lock of a data directory",
        "S42",
        (_in("process_lock", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),),
    ),
    Mutant(
        "log-left-behind",
        "a damaged file is set aside without its log, which is replayed into the file that is put back",
        "S41",
        (
            _in(
                "sqlite_file",
                "        moved = (target, *_move_companions(real_path, target))\n",
                "        moved = (target,)\n",
            ),
        ),
    ),
    Mutant(
        "id-used-again-finds-its-row",
        "deleting a workflow leaves its row in the catalog",
        "S52",
        (
            _in(
                "catalog",
                '        """Remove all that is known of a workflow."""\n'
                "        with self._using(), self._transaction():\n"
                "            remove_row(self._connection, workflow_id)\n",
                '        """Remove all that is known of a workflow."""\n'
                "        with self._using(), self._transaction():\n",
            ),
        ),
    ),
    Mutant(
        "mail-does-not-wake",
        "a workflow that sleeps with mail that it waits for is woken by its alarm only",
        "S27 S45 S50",
        (_in("wake", "        return 0 if wants_mail else alarm_ms\n", "        return alarm_ms\n"),),
    ),
    Mutant(
        "running-is-not-due",
        "a workflow that was at work when its process died is not brought back",
        "S43 S50",
        (
            _in(
                "wake",
                "        return alarm_ms or 0\n    return 0\n",
                "        return alarm_ms or 0\n    return None\n",
            ),
        ),
    ),
    Mutant(
        "codec-skipped-for-messages",
        "the messages in a mailbox are stored without having passed the value codec",
        "S39",
        (_in("coded_values", "    MAILBOX_PREFIX: (_seal_message, _open_message),\n", ""),),
    ),
    Mutant(
        "journal-not-synced",
        "a young workflow's batch is acknowledged once its record is handed to the system",
        "S40",
        (
            _in(
                "journal",
                "        if self._is_full or not young.is_durable:\n            await self.sync(position)\n",
                "        if not young.is_durable:\n            await self.sync(position)\n",
            ),
            _in(
                "journal",
                "        if self._is_full or not young.is_durable:\n            self._sync_here()\n",
                "        if not young.is_durable:\n            self._sync_here()\n",
            ),
        ),
    ),
    Mutant(
        "birth-not-handed-over",
        "the catalog is told of a young workflow before its birth is handed to the system",
        "S39 S50",
        (
            _in(
                "journal",
                "        self._append(born_record(segment.seed, young.number, file))\n        self._flush()\n",
                "        self._append(born_record(segment.seed, young.number, file))\n",
            ),
        ),
    ),
    Mutant(
        "filing-not-settled",
        "a file is used, or removed, before it is durable that its workflow is not young any more",
        "S40 S52",
        (
            _in(
                "journal",
                "            ) from error\n        await self.sync(position)\n",
                "            ) from error\n        self._check(position)\n",
            ),
        ),
    ),
    Mutant(
        "segment-removed-too-early",
        "a segment of the journal is removed although a workflow that was born in it has no file yet",
        "S39 S40",
        (
            _in(
                "journal",
                "            if segment is self._open or segment.unfiled or not self._may_remove:\n",
                "            if segment is self._open or not self._may_remove:\n",
            ),
        ),
    ),
    Mutant(
        "replay-forgets-filing",
        "replay of the journal gives a file to workflows that had one, and were deleted since",
        "S39 S52",
        (
            _in(
                "journal_replay",
                "                    young.pop(number, None)\n",
                "                    young.get(number)\n",
            ),
        ),
    ),
    Mutant(
        "failed-sync-is-tried-again",
        "after a sync of the journal that failed, workflows go on writing to it",
        "S40 S41",
        (
            _in(
                "journal",
                "            young.is_failed = True\n            if young.filed_at",
                "            if young.filed_at",
            ),
        ),
    ),
    Mutant(
        "middle-lost-at-normal",
        "at `normal` a segment of the journal is begun before the one before it is durable",
        "S40",
        (_in("journal", "            self._seal(segment)\n", "            pass\n"),),
    ),
)
"""In the order of the list that is printed."""
