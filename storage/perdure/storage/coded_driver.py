"""A driver that codes user data on its way to another driver, and decodes it on its way back.

1. Whoever uses it sees plain values; below it, and so on disk, in write-ahead logs and in backups, user data is coded.
2. That a namespace holds coded values is written in it (`CODEC_KEY`), with the first of them and in the same batch. Without
   a codec such a namespace is refused when it is loaded, before anything of it is run. The key is not shown above.
3. A batch that cannot be coded is refused whole: nothing was written, and everything is pending still.
4. Its largest value is smaller than that of the driver below by what coding may add, so whatever fits here fits there.

Rejected: coding in the engine, where values are made. Each place that makes or reads one would have to think of it, and
one that forgot would write plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from perdure.storage.codec import CODED_BYTES_MAX, GuardedCodec, ValueCodec, ValueCodecRefusedError
from perdure.storage.coded_values import open_value, seal_value
from perdure.storage.driver import Batch, Driver, SingleWrites, nowait_batch
from perdure.storage.layout import CODEC_KEY, WORKFLOW_ID_KEY, encode_u64
from perdure.storage.limits import MAX_KV_BATCH_PAYLOAD_BYTES, check_batch
from perdure.storage.split import commit_batch

__all__ = ["CODEC_VERSION", "CodedDriver"]

CODEC_VERSION = 1
"""Version of the form of coded values; stored at `CODEC_KEY`. Never reused."""

_Pairs: TypeAlias = list[tuple[bytes, bytes]]  # inside the class, `list` is the driver's method


class CodedDriver(SingleWrites):
    """A `Driver` whose user data a codec wraps. Closing it closes the driver below.

    Use it as the driver of one workflow, with `run_workflow`, `start_workflow`, `send_message`, `load_snapshot` and
    `replay_from_step`. A supervisor makes its own: `open_supervisor(..., codec=codec)`. Its methods are checkpoints where
    those of the driver below are.

    Args:
        inner: Where the coded values go.
        codec: What wraps and unwraps them.
        workflow_id: Whose namespace it is; codecs may bind values to it. Empty for what belongs to no workflow.

    Raises:
        TypeError: `codec` is not a `ValueCodec`.
        ValueError: Its `overhead_bytes` is negative, or leaves no room for values.
    """

    def __init__(self, inner: Driver, codec: ValueCodec, workflow_id: str) -> None:
        self._inner = inner
        self._codec = GuardedCodec(codec, workflow_id)
        self._batch_nowait = nowait_batch(inner) if inner.atomic_batch else None
        largest = (
            inner.value_bytes_max if inner.atomic_batch else min(inner.value_bytes_max, MAX_KV_BATCH_PAYLOAD_BYTES)
        )
        self._value_bytes_max = largest - self._codec.overhead_bytes - CODED_BYTES_MAX
        if self._value_bytes_max < 1:
            raise ValueError(
                f"a codec with overhead_bytes={self._codec.overhead_bytes} leaves no room in values of at most "
                f"{largest} bytes"
            )
        self._is_marked = False
        self._sealed: tuple[Batch, Batch] | None = None

    def __repr__(self) -> str:
        return f"<CodedDriver of workflow {self._codec.workflow_id!r:.200} over {self._inner!r}>"

    @property
    def inner(self) -> Driver:
        """The driver below, which has the coded values."""
        return self._inner

    @property
    def atomic_batch(self) -> bool:
        """As the driver below."""
        return self._inner.atomic_batch

    @property
    def value_bytes_max(self) -> int:
        """Largest value in bytes before it is coded: that of the driver below, less what coding may add."""
        return self._value_bytes_max

    async def get(self, key: bytes) -> bytes | None:
        """The value at `key`, decoded, or `None`.

        Raises:
            ValueCodecError: It cannot be decoded.
        """
        value = await self._inner.get(key)
        return None if value is None or key == CODEC_KEY else open_value(key, value, self._codec)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Every pair whose key starts with `prefix`, decoded, in bytewise order of keys.

        Raises:
            ValueCodecError: One of them cannot be decoded.
        """
        codec = self._codec
        opened: _Pairs = []
        for key, value in await self._inner.list(prefix):
            if key == CODEC_KEY:
                self._is_marked = True
            else:
                opened.append((key, open_value(key, value, codec)))
        return opened

    async def batch(self, batch: Batch) -> None:
        """Apply a batch, its user data coded.

        Raises:
            ValueCodecRefusedError: The codec could not encode a value; nothing was written.
            ValueTooLargeError: A value is over the limit; nothing was written.
            BatchRefusedError, CommitUnknownError: As the driver below.
        """
        sealed = self._seal(batch)
        # Coded, a piece that was cut to what a driver that is not atomic takes may have outgrown that.
        await commit_batch(self._inner, sealed)
        self._written(sealed)

    def batch_nowait(self, batch: Batch) -> bool:
        """Apply the batch here and now, where the driver below would; raises as `batch` does."""
        if self._batch_nowait is None:
            return False
        sealed = self._seal(batch)
        if self._batch_nowait(sealed):
            self._written(sealed)
            return True
        self._sealed = (batch, sealed)  # the same one is likely to be given to `batch` next
        return False

    def _seal(self, batch: Batch) -> Batch:
        if self._sealed is not None and self._sealed[0] is batch:
            return self._sealed[1]
        check_batch(batch, self._value_bytes_max)
        codec = self._codec
        puts: _Pairs = []
        has_coded = False
        for key, value in batch.puts:
            sealed = seal_value(key, value, codec)
            has_coded = has_coded or sealed is not value
            puts.append((key, sealed))
            if key == WORKFLOW_ID_KEY:
                self._check_id(value)
        if has_coded and not (self._is_marked and not _removes_mark(batch)):
            puts.append((CODEC_KEY, encode_u64(CODEC_VERSION)))
        return Batch(puts, batch.deletes, batch.delete_prefixes, batch.delete_ranges, batch.alarm)

    def _check_id(self, stored: bytes) -> None:
        workflow_id = stored.decode(errors="replace")
        if workflow_id != self._codec.workflow_id:
            raise ValueCodecRefusedError(
                f"this CodedDriver was made for workflow {self._codec.workflow_id!r:.200}, and {workflow_id!r:.200} runs on "
                f"it; write CodedDriver(driver, codec, {workflow_id!r:.200})",
                workflow_id=workflow_id,
            )

    def _written(self, sealed: Batch) -> None:
        self._sealed = None
        if self._is_marked and _removes_mark(sealed):
            self._is_marked = False
        self._is_marked = self._is_marked or any(key == CODEC_KEY for key, _ in sealed.puts)

    async def set_alarm(self, workflow_id: str, wake_at_ms: int) -> None:
        """As the driver below."""
        await self._inner.set_alarm(workflow_id, wake_at_ms)

    async def get_alarm(self, workflow_id: str) -> int | None:
        """As the driver below."""
        return await self._inner.get_alarm(workflow_id)

    async def clear_alarm(self, workflow_id: str) -> None:
        """As the driver below."""
        await self._inner.clear_alarm(workflow_id)

    async def aclose(self) -> None:
        """Close the driver below."""
        await self._inner.aclose()


def _removes_mark(batch: Batch) -> bool:
    """Whether the deletions of a batch, which come before its puts, take away that the namespace holds coded values."""
    return (
        CODEC_KEY in batch.deletes
        or any(CODEC_KEY.startswith(prefix) for prefix in batch.delete_prefixes)
        or any(start <= CODEC_KEY < end for start, end in batch.delete_ranges)
    )
