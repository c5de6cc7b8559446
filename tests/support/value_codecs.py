"""Codecs for tests: ones that need no other package, and that tests can look into.

1. `XorCodec` hides plain text well enough for a test to look for it, binds data to its context, and knows a wrong key only by
   what Perdure itself checks.
2. `KeyRing` is how a user's codec rotates keys: it writes with the first key, and reads with any.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from hashlib import sha256

from perdure.storage import ValueContext

__all__ = ["Compressing", "KeyRing", "SealedCodec", "XorCodec"]


def _stream(key: bytes, context: ValueContext, nonce: bytes, size: int) -> bytes:
    seed = sha256(key + nonce + context.workflow_id.encode() + b"\0" + context.kind.encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


def _xor(data: bytes, stream: bytes) -> bytes:
    return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")


class XorCodec:
    """Hides data and checks nothing.

    Attributes:
        kinds: What it was asked to encode, in order.
    """

    overhead_bytes = 4

    def __init__(self, key: bytes = b"key") -> None:
        self._key = key
        self._count = 0
        self.kinds: list[str] = []

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        self.kinds.append(context.kind)
        self._count += 1
        nonce = self._count.to_bytes(4, "big")
        return nonce + _xor(data, _stream(self._key, context, nonce, len(data)))

    def decode(self, data: bytes, context: ValueContext) -> bytes:
        return _xor(data[4:], _stream(self._key, context, data[:4], len(data) - 4))


class SealedCodec(XorCodec):
    """The same with a tag over data and context, so that it raises where the key is wrong or the data damaged."""

    overhead_bytes = 12

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        coded = super().encode(data, context)
        return self._tag(coded, context) + coded

    def decode(self, data: bytes, context: ValueContext) -> bytes:
        if data[:8] != self._tag(data[8:], context):
            raise ValueError("the tag is wrong")
        return super().decode(data[8:], context)

    def _tag(self, coded: bytes, context: ValueContext) -> bytes:
        return sha256(self._key + coded + repr((context.workflow_id, context.kind)).encode()).digest()[:8]


class KeyRing:
    """Writes with the first of several codecs, and reads with whichever can."""

    overhead_bytes = 12

    def __init__(self, codecs: Sequence[SealedCodec]) -> None:
        self._codecs = codecs

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        return self._codecs[0].encode(data, context)

    def decode(self, data: bytes, context: ValueContext) -> bytes:
        for codec in self._codecs:
            try:
                return codec.decode(data, context)
            except ValueError:
                continue
        raise ValueError("no key fits")


class Compressing:
    """Makes data shorter; what does not get shorter grows by what deflate needs for its blocks."""

    overhead_bytes = 1024

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        return zlib.compress(data)

    def decode(self, data: bytes, context: ValueContext) -> bytes:
        return zlib.decompress(data)
