"""Every error has a status, a stable name and a body over HTTP."""

import pytest

import raftq.client.common.disk  # noqa: F401 - it has errors of its own
from raftq.client.common.errors import (
    InvalidArgument,
    NotEnoughReplicas,
    RaftqError,
    RequestTimeout,
    Throttled,
    UnknownTopic,
)
from raftq.node.http.errors import (
    MESSAGE_CHARACTERS_MAX,
    REFUSALS,
    STATUS,
    Refusal,
    error_body,
    name_of,
    retry_after_s,
    status_of,
)

# Those that a node may meet.
CODES = sorted(
    code
    for code, kind in RaftqError.registry.items()
    if not kind.__module__.startswith("raftq.client.spark")
)


def test_every_error_class_has_a_status_and_every_status_a_class() -> None:
    assert sorted(STATUS) == CODES


@pytest.mark.parametrize("code", CODES)
def test_every_error_becomes_a_whole_answer(code: str) -> None:
    error = RaftqError.registry[code]("what happened")
    assert status_of(error) in {400, 401, 403, 404, 409, 410, 413, 422, 429, 500, 503, 507}
    assert name_of(error) == code.upper()
    body = error_body(error)
    assert body["error"] == "what happened"
    assert body["code"] == code.upper()
    assert type(body["retriable"]) is bool
    assert (retry_after_s(error) is not None) == (status_of(error) in {429, 503})


def test_names_of_refusals_mean_the_same_as_names_of_errors() -> None:
    shared = {code.upper(): status for code, status in STATUS.items() if code.upper() in REFUSALS}
    assert shared == {name: REFUSALS[name] for name in shared}
    assert "THROTTLED" in shared


def test_a_newer_error_class_answers_like_its_closest_ancestor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(STATUS, "invalid_argument")
    assert status_of(InvalidArgument("x")) == STATUS["request_refused"]
    monkeypatch.delitem(STATUS, "request_refused")
    assert status_of(InvalidArgument("x")) == STATUS["error"]


def test_retry_after_is_what_the_error_asks_for_in_whole_seconds() -> None:
    assert retry_after_s(Throttled("x").with_details(wait_ms=2_001)) == 3
    assert retry_after_s(Throttled("x").with_details(wait_ms=1)) == 1
    assert retry_after_s(Throttled("x").with_details(wait_ms=10**12)) == 600
    assert retry_after_s(Throttled("x").with_details(wait_ms="soon")) == 1
    assert retry_after_s(NotEnoughReplicas("x")) == 1
    assert retry_after_s(UnknownTopic("x")) is None


def test_an_unknown_outcome_is_said_and_a_failed_one_is_not() -> None:
    assert error_body(RequestTimeout("x"))["outcome"] == "unknown"
    assert "outcome" not in error_body(NotEnoughReplicas("x"))
    assert error_body(Refusal("REQUEST_TIMEOUT", "x", unknown=True))["outcome"] == "unknown"


def test_something_unknown_is_not_worth_a_retry_over_http() -> None:
    assert UnknownTopic.retriable
    assert error_body(UnknownTopic("x"))["retriable"] is False


def test_a_sentence_is_never_empty_endless_or_unencodable() -> None:
    assert error_body(UnknownTopic(""))["error"] == "UnknownTopic"
    assert len(error_body(UnknownTopic("x" * 100_000))["error"]) == MESSAGE_CHARACTERS_MAX
    error_body(UnknownTopic("\ud800"))["error"].encode()
