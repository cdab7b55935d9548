"""Every error RaftQ raises, with the decision it carries.

    RaftqError
    ├── RequestError            the request was understood and refused
    │   ├── LeaseLost           the receipt no longer holds its record
    │   │   ├── LeaseExpired    its time ran out
    │   │   ├── LeaseReplaced   the record was delivered again under another receipt
    │   │   ├── LeaseForeign    the receipt belongs to another group
    │   │   └── AlreadySettled  the record was settled before
    │   ├── OffsetOutOfRange    no such offset is kept
    │   ├── TooLarge            a record or batch is over a limit
    │   ├── QueueFull           a limit on messages or bytes is reached
    │   ├── QueueClosed         the queue was closed
    │   ├── UnknownCheckpoint   no checkpoint has that name
    │   └── InvalidArgument     a value that no caller should pass
    ├── StorageError            the disk or what is on it
    │   ├── CorruptBatch        a batch fails its checks
    │   ├── CorruptFile         another file fails its checks
    │   ├── UnknownFormat       written by a newer version
    │   ├── DiskFull            no space left; nothing was written
    │   ├── DirectoryLocked     another process has the directory open
    │   ├── DirectoryReadOnly   the directory cannot be written to
    │   └── StorageFailed       a write or fsync failed; the log refuses writes until it is reopened
    └── ConfigError             settings that contradict each other or make no sense

`outcome` says whether the refused operation can have taken effect: "failed" means it did not,
"unknown" means it may have. `retriable` says whether the same call can succeed later.
"""

from typing import ClassVar, Literal

Outcome = Literal["failed", "unknown"]


class RaftqError(Exception):
    """Base of every error of this package."""

    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False
    outcome: Outcome = "failed"
    registry: ClassVar[dict[str, type["RaftqError"]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        code = cls.__dict__.get("code")
        if code is None:
            raise TypeError(f"{cls.__name__} needs a code of its own")
        if code in RaftqError.registry:
            raise TypeError(f"{cls.__name__} repeats the code {code!r}")
        RaftqError.registry[code] = cls


RaftqError.registry[RaftqError.code] = RaftqError


class RequestError(RaftqError):
    code = "request_refused"


class LeaseLost(RequestError):
    code = "lease_lost"


class LeaseExpired(LeaseLost):
    code = "lease_expired"


class LeaseReplaced(LeaseLost):
    code = "lease_replaced"


class LeaseForeign(LeaseLost):
    code = "lease_foreign"


class AlreadySettled(LeaseLost):
    code = "already_settled"


class OffsetOutOfRange(RequestError):
    code = "offset_out_of_range"


class TooLarge(RequestError):
    code = "too_large"


class QueueFull(RequestError):
    code = "queue_full"
    retriable = True


class QueueClosed(RequestError):
    code = "queue_closed"


class UnknownCheckpoint(RequestError):
    code = "unknown_checkpoint"


class InvalidArgument(RequestError, ValueError):
    code = "invalid_argument"


class StorageError(RaftqError):
    code = "storage"


class CorruptBatch(StorageError):
    code = "corrupt_batch"


class CorruptFile(StorageError):
    code = "corrupt_file"


class UnknownFormat(StorageError):
    code = "unknown_format"


class DiskFull(StorageError):
    code = "disk_full"
    retriable = True


class DirectoryLocked(StorageError):
    code = "directory_locked"
    retriable = True


class DirectoryReadOnly(StorageError):
    code = "directory_read_only"


class StorageFailed(StorageError):
    code = "storage_failed"
    outcome = "unknown"


class ConfigError(RaftqError):
    code = "config"
