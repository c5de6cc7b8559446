"""What wraps user data at rest: encryption, compression or the like, as the user's own code.

1. A codec sees the bytes of user data and of whom and what they are; keys, names, ids, states, alarms and attributes are
   not given to it and stay legible.
2. What it makes of them begins with a mark that no plain value begins with, so values from before the codec was turned on
   are read as they are. Only what is marked is decoded.
3. Whatever a codec raises, and whatever else it does wrong, becomes a `ValueCodecError` that names the workflow: the
   storage cannot be used until someone repairs it, and nothing that the workflow did is lost or fails by it.
4. One stored value is one call, whatever it holds, so its size grows by a stated number of bytes.
5. What a codec is given begins with a checksum, so a wrong key is seen also by codecs that do not see it themselves; else the
   workflow would go on with noise.

Where user data is in the stored values is `coded_values`, what calls it is `coded_driver`. Rejected: handing values to the
codec before they are encoded as CBOR. It could then return objects that no history can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, cast, runtime_checkable
from zlib import crc32

from perdure.storage.errors import BatchRefusedError, StorageError

__all__ = [
    "CODED_BYTES_MAX",
    "CODED_MARK",
    "CODED_TEXT_MARK",
    "GuardedCodec",
    "ValueCodec",
    "ValueCodecError",
    "ValueCodecRefusedError",
    "ValueContext",
    "ValueKind",
    "check_codec",
]

CODED_MARK: Final = b"\xff\x01"
"""Before every coded value: the sign that ends a CBOR item of open length, with which none begins, and the version of this
form. Stored on disk; never change or reuse."""

CODED_TEXT_MARK: Final = "\x001:"
"""The same before coded text, which is base64: a NUL, with which no name of a Python class begins, and the version. Stored
on disk; never change or reuse."""

CODED_BYTES_MAX: Final = 24
"""What a stored value grows by, at most, beside the codec's own overhead: the mark, the checksum, and how its fields are held
together. (Structs with many fields grow by a byte for each; the engine leaves more than that for each branch.)"""

_CHECKSUM_BYTES: Final = 4
_CHECKSUM_START: Final = 0x50455244
"""So that neither nothing nor zeros have a checksum of zero. Stored on disk; never change or reuse."""

ValueKind: TypeAlias = Literal[
    "input",
    "output",
    "error",
    "step",
    "loop",
    "loop_start",
    "message",
    "join",
    "race",
    "attempt",
    "detail",
    "reply",
    "schedule",
    "call",
]
"""What a value is: the workflow's input, output or error (with what caused it); what a history entry of a kind holds (a
waiting message is a `message` as well); the error texts of attempts; what a replay needs beyond them; the state that an
iteration began with; the reply to a request; what a schedule starts its workflows with; what came of a workflow that was
called. Codecs may bind data to it, so none is ever renamed."""


@dataclass(frozen=True, slots=True)
class ValueContext:
    """Whose and what a value is: what a codec may bind its data to.

    Attributes:
        workflow_id: The workflow's id; empty for what belongs to the supervisor.
        kind: What the value is.
    """

    workflow_id: str
    kind: ValueKind


@runtime_checkable
class ValueCodec(Protocol):
    """Wraps user data before it is stored, and unwraps it when it is read.

    Both methods are called on Trio's thread, for each value that is written or loaded: they must be quick and wait for
    nothing (fetch keys beforehand). Encoding the same data twice may give different bytes. `decode` has to read whatever an
    earlier `encode` made, also under an older key: that is how keys are rotated. What they raise becomes a
    `ValueCodecError`.
    """

    @property
    def overhead_bytes(self) -> int:
        """By how many bytes, at most, `encode` makes its data longer; 0 or more, the same for as long as it is used."""
        ...

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        """Wrap data, whose form is not to be relied on."""
        ...

    def decode(self, data: bytes, context: ValueContext) -> bytes:
        """The data that `encode` was given with an equal context; an exception if it cannot be had."""
        ...


class ValueCodecError(StorageError):
    """A stored value cannot be decoded: a wrong or missing key, damaged data, or no codec where there was one.

    Nothing is lost and the workflow does not fail by it: with the right codec it goes on.

    Attributes:
        workflow_id: Whose value; empty where that is not known.
        kind: What it is, or `None` where that is not known.
    """

    workflow_id: str = ""
    kind: ValueKind | None = None


class ValueCodecRefusedError(ValueCodecError, BatchRefusedError):
    """The codec could not encode a value. Nothing was written, and everything can be written later."""


def check_codec(codec: object) -> ValueCodec:
    """A codec, and not something else.

    Raises:
        TypeError: It is not one.
        ValueError: Its `overhead_bytes` is no whole number of bytes.
    """
    if isinstance(codec, type) or not isinstance(codec, ValueCodec):
        raise TypeError(
            f"a codec is an object with encode(data, context), decode(data, context) and overhead_bytes, not {codec!r:.200}"
        )
    overhead = cast("object", codec.overhead_bytes)
    if not isinstance(overhead, int) or isinstance(overhead, bool) or overhead < 0:
        raise ValueError(f"overhead_bytes of {codec!r:.200} must be a whole number of 0 or more, not {overhead!r}")
    return codec


class GuardedCodec:
    """A user's codec for one workflow, whose mistakes are typed errors.

    Args:
        codec: The user's.
        workflow_id: Whose values.

    Attributes:
        overhead_bytes: By how much data grows at most.
    """

    __slots__ = ("_codec", "_contexts", "overhead_bytes", "workflow_id")

    def __init__(self, codec: ValueCodec, workflow_id: str) -> None:
        self._codec = check_codec(codec)
        self._contexts: dict[ValueKind, ValueContext] = {}
        self.workflow_id: str = workflow_id
        self.overhead_bytes: int = codec.overhead_bytes

    def encode(self, data: bytes, kind: ValueKind) -> bytes:
        """Wrap data.

        Raises:
            ValueCodecRefusedError: The codec could not, or broke its word.
        """
        checked = _checksum(data) + data
        try:
            coded = cast("object", self._codec.encode(checked, self._context(kind)))
        except Exception as error:
            raise ValueCodecRefusedError(
                f"the codec could not encode the {kind} of workflow {self.workflow_id!r:.200} ({type(error).__name__}: "
                f"{error}); nothing was written. Mend the codec or its keys, and it is tried again",
                workflow_id=self.workflow_id,
                kind=kind,
            ) from error
        if not isinstance(coded, bytes):
            wrong = f"encode() returned a {type(coded).__name__}; it has to return bytes"
        elif len(coded) > len(checked) + self.overhead_bytes:
            wrong = (
                f"encode() made {len(coded)} bytes of {len(checked)}, more than overhead_bytes={self.overhead_bytes} allows; "
                "state a larger overhead_bytes"
            )
        else:
            return coded
        raise ValueCodecRefusedError(
            f"{wrong}. Nothing of workflow {self.workflow_id!r:.200} was written",
            workflow_id=self.workflow_id,
            kind=kind,
        )

    def decode(self, data: bytes, kind: ValueKind) -> bytes:
        """Unwrap data.

        Raises:
            ValueCodecError: The codec could not.
        """
        try:
            plain = cast("object", self._codec.decode(data, self._context(kind)))
        except Exception as error:
            raise self.failure(kind, f"({type(error).__name__}: {error})") from error
        if not isinstance(plain, bytes):
            raise self.failure(kind, f"(decode() returned a {type(plain).__name__}; it has to return bytes)")
        checksum, decoded = plain[:_CHECKSUM_BYTES], plain[_CHECKSUM_BYTES:]
        if _checksum(decoded) != checksum:
            raise self.failure(kind, "(decode() did not return what encode() was given)")
        return decoded

    def failure(self, kind: ValueKind, reason: str) -> ValueCodecError:
        """The error for a value that cannot be decoded, which the caller raises."""
        return ValueCodecError(
            f"the {kind} of workflow {self.workflow_id!r:.200} cannot be decoded {reason}; nothing is lost, and with the codec "
            "and the keys that wrote it, it goes on",
            workflow_id=self.workflow_id,
            kind=kind,
        )

    def _context(self, kind: ValueKind) -> ValueContext:
        context = self._contexts.get(kind)
        if context is None:
            context = self._contexts[kind] = ValueContext(self.workflow_id, kind)
        return context


def _checksum(data: bytes) -> bytes:
    return crc32(data, _CHECKSUM_START).to_bytes(_CHECKSUM_BYTES, "little")
