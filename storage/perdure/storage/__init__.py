"""The bytes of Perdure: keys, codecs, values, drivers and stores. Knows nothing of workflows.

A driver keeps the namespace of one workflow; a store keeps many, and a catalog of them.
"""

import logging

from perdure.storage import layout as layout
from perdure.storage.attributes import InvalidAttributeError
from perdure.storage.codec import ValueCodec, ValueCodecError, ValueCodecRefusedError, ValueContext, ValueKind
from perdure.storage.coded_driver import CodedDriver
from perdure.storage.coded_store import CodedStore
from perdure.storage.driver import VALUE_BYTES_MAX, AlarmChange, Batch, Driver, NowaitDriver
from perdure.storage.errors import (
    BatchRefusedError,
    CommitUnknownError,
    CorruptStoreError,
    DecodeError,
    DriverClosedError,
    EncodeError,
    FormatVersionError,
    NamespaceNotFoundError,
    PerdureError,
    StorageError,
    StoreBusyError,
    StoreLockedError,
    UnsupportedFileSystemError,
    ValueTooLargeError,
)
from perdure.storage.file_store import FileStore
from perdure.storage.memory import MemoryDriver
from perdure.storage.memory_store import MemoryStore
from perdure.storage.split import MAX_KV_BATCH_ENTRIES, MAX_KV_BATCH_PAYLOAD_BYTES, commit_batch
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.store import CatalogRow, CreatingStore, Store
from perdure.storage.values import (
    ErrorValue,
    OversizedValueError,
    TaggedValue,
    ValueDecodeError,
    ValueEncodeError,
    ValueTooDeepError,
    decode_value,
    encode_value,
    round_trip,
)

__all__ = [
    "AlarmChange",
    "Batch",
    "BatchRefusedError",
    "CatalogRow",
    "CodedDriver",
    "CodedStore",
    "CommitUnknownError",
    "CorruptStoreError",
    "CreatingStore",
    "DecodeError",
    "Driver",
    "DriverClosedError",
    "EncodeError",
    "ErrorValue",
    "FileStore",
    "FormatVersionError",
    "InvalidAttributeError",
    "MAX_KV_BATCH_ENTRIES",
    "MAX_KV_BATCH_PAYLOAD_BYTES",
    "MemoryDriver",
    "MemoryStore",
    "NamespaceNotFoundError",
    "NowaitDriver",
    "OversizedValueError",
    "PerdureError",
    "SqliteDriver",
    "StorageError",
    "Store",
    "StoreBusyError",
    "StoreLockedError",
    "TaggedValue",
    "UnsupportedFileSystemError",
    "VALUE_BYTES_MAX",
    "ValueCodec",
    "ValueCodecError",
    "ValueCodecRefusedError",
    "ValueContext",
    "ValueDecodeError",
    "ValueEncodeError",
    "ValueKind",
    "ValueTooDeepError",
    "ValueTooLargeError",
    "commit_batch",
    "decode_value",
    "encode_value",
    "round_trip",
]

# Without configuration nothing of ours is output, not even a warning on stderr.
logging.getLogger("perdure").addHandler(logging.NullHandler())
