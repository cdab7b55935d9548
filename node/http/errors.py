"""Which status and which name each error has over HTTP. (Pure.)

Every class of the error registry has a row in `STATUS`; its name over HTTP is its code in capitals.
What only HTTP knows (an unknown path, a body that is no JSON) is a `Refusal`, with a name from
`REFUSALS`. The body of every error is

    {"error": "<human sentence>", "code": "<STABLE_NAME>", "retriable": true|false}

and, where the operation may have taken effect nevertheless, `"outcome": "unknown"`.
"""

from typing import Any

from raftq.client.common.errors import RaftqError

STATUS: dict[str, int] = {
    "error": 500,
    "request_refused": 400,
    "lease_lost": 410,
    "lease_expired": 410,
    "lease_replaced": 410,
    "lease_foreign": 409,
    "already_settled": 410,
    "offset_out_of_range": 404,
    "too_large": 413,
    "queue_full": 429,
    "queue_closed": 503,
    "unknown_checkpoint": 404,
    "unknown_topic": 404,
    "unknown_partition": 404,
    "not_leader": 503,
    "leader_lost": 503,
    "fenced_epoch": 409,
    "fenced_generation": 409,
    "fenced_producer": 409,
    "out_of_order_sequence": 409,
    "not_enough_replicas": 503,
    "throttled": 429,
    "node_stopping": 503,
    "topic_exists": 409,
    "node_id_taken": 409,
    "unknown_group": 404,
    "group_not_empty": 409,
    "access_denied": 403,
    "invalid_argument": 400,
    "transport": 503,
    "connect_failed": 503,
    "connection_lost": 503,
    "request_timeout": 503,
    "protocol": 500,
    "local_protocol": 400,
    "remote_protocol": 500,
    "unsupported_version": 503,
    "internal": 500,
    "unknown_code": 500,
    "storage": 500,
    "corrupt_batch": 500,
    "corrupt_file": 500,
    "unknown_format": 500,
    "disk_full": 507,
    "directory_locked": 503,
    "directory_read_only": 507,
    "storage_failed": 500,
    "file_closed": 503,
    "consensus": 503,
    "no_leader": 503,
    "outcome_unknown": 503,
    "consensus_stopped": 503,
    "consensus_broken": 500,
    "config": 400,
}

REFUSALS: dict[str, int] = {
    "BAD_REQUEST": 400,
    "INVALID_ARGUMENT": 400,
    "NOT_SUPPORTED": 400,
    "CROSS_ORIGIN": 403,
    "NOT_FOUND": 404,
    "METHOD_NOT_ALLOWED": 405,
    "BODY_TIMEOUT": 408,
    "TOO_LARGE": 413,
    "UNSUPPORTED_MEDIA_TYPE": 415,
    "THROTTLED": 429,
    "INTERNAL": 500,
    "REQUEST_TIMEOUT": 503,
}
"""BAD_REQUEST is what is no HTTP or no JSON at all; a wrong field is an INVALID_ARGUMENT."""

RETRY_AFTER_S = 1
RETRY_AFTER_S_MAX = 600
MESSAGE_CHARACTERS_MAX = 2048


class Refusal(Exception):
    """A request that is refused before anything but HTTP has seen it."""

    def __init__(self, code: str, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.status = REFUSALS[code]
        self.retriable = self.status in (408, 429, 503)
        self.unknown = unknown
        self.headers: dict[str, str] = {}


def invalid(field: str, problem: str) -> Refusal:
    """A value that no caller should send; the field is named as the caller wrote it."""
    return Refusal("INVALID_ARGUMENT", f"{field}: {problem}")


def status_of(error: RaftqError | Refusal) -> int:
    if isinstance(error, Refusal):
        return error.status
    status = STATUS.get(error.code)
    if status is not None:
        return status
    # A class that is newer than the table: its closest listed ancestor decides.
    for base in type(error).__mro__[1:]:
        listed = STATUS.get(getattr(base, "code", ""))
        if listed is not None:
            return listed
    return 500


def name_of(error: RaftqError | Refusal) -> str:
    return error.code if isinstance(error, Refusal) else error.code.upper()


def is_retriable(error: RaftqError | Refusal) -> bool:
    """Over HTTP an unknown thing stays unknown: the node has looked for it already."""
    return error.retriable and status_of(error) != 404


def sentence(error: BaseException) -> str:
    """The error's text: never empty, never endless, always encodable."""
    text = str(error).encode(errors="replace").decode()[:MESSAGE_CHARACTERS_MAX]
    return text or type(error).__name__


def error_body(error: RaftqError | Refusal) -> dict[str, Any]:
    body: dict[str, Any] = {
        "error": sentence(error),
        "code": name_of(error),
        "retriable": is_retriable(error),
    }
    unknown = error.unknown if isinstance(error, Refusal) else error.outcome == "unknown"
    if unknown:
        body["outcome"] = "unknown"
    return body


def retry_after_s(error: RaftqError | Refusal) -> int | None:
    """For the Retry-After header of 429 and 503: what the error asks for, else a second."""
    if status_of(error) not in (429, 503):
        return None
    wait_ms = None if isinstance(error, Refusal) else error.details.get("wait_ms")
    if type(wait_ms) is not int:
        return RETRY_AFTER_S
    return min(max(1, -(-wait_ms // 1000)), RETRY_AFTER_S_MAX)
