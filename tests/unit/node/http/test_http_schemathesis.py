"""Requests made from the OpenAPI document, at a real node: what it calls valid is taken, what it
does not is refused, every answer is as declared, and nothing is a failure of the node."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live_node import live_node
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from raftq.node.http.kinds import DURATION_FORMAT

EXAMPLES = {GenerationMode.POSITIVE: 8, GenerationMode.NEGATIVE: 5}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
# What a schema of single fields cannot say.
BEYOND_SCHEMAS = (
    "cannot be given together", "is not valid base64", "is before since", "is there twice",
    "is more than 100 years away", "retention_hours: must be a time", "which is no less",
    "is more than the replication", "as many nodes",
)  # fmt: skip
KEPT = {"topic": "orders", "partition": 0}
PARTITIONS_MAX = 3


# Good for every field that is a duration, whatever its limits.
durations = st.sampled_from(["1s", "1.5s", "2000ms", "3s", "1s500ms"])


def packed(context: Any, value: Any) -> bytes:
    try:
        return bytes(msgpack.packb(value))
    except OverflowError:
        return b"\xc1"  # which is no msgpack at all


def unpacked(context: Any, response: Any) -> Any:
    return msgpack.unpackb(response.content)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("node")
    schemathesis.openapi.format(DURATION_FORMAT, durations)
    schemathesis.serializer("application/msgpack")(packed)
    schemathesis.deserializer("application/msgpack")(unpacked)
    with live_node(directory) as live:
        made = requests.post(f"{live.http}/topics", json={"name": "orders", "num_partitions": 2})
        assert made.status_code == 201
        yield f"{live.http}/v1"


def operations(base: str) -> list[APIOperation[Any, Any, Any, Any]]:
    document = requests.get(f"{base}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=base)
    return [one.ok() for one in schema.get_all_operations()]


def check_taken(case: Case, response: Any) -> None:
    if response.status_code == 400:
        problem = response.content.decode(errors="replace")
        assert any(one in problem for one in BEYOND_SCHEMAS), (case.body, case.query, problem)


def attack(base: str, mode: GenerationMode) -> Counter[str]:
    """Send random requests to every operation; the statuses by operation."""
    statuses: Counter[str] = Counter()
    with requests.Session() as session:
        for operation in operations(base):
            raw = operation.definition.raw
            takes_something = raw.get("parameters") or raw.get("requestBody")
            if mode is GenerationMode.POSITIVE or takes_something:
                attack_one(operation, mode, session, statuses)
    return statuses


def kept_receipt(receipt: str) -> str:
    """The same of a partition that is there."""
    return ":".join(("orders", "0", *receipt.split(":")[2:]))


def tame(case: Case, name: str) -> None:
    """Let valid requests meet what is there, and not make a hundred thousand partitions."""
    if name != "delete_topic":
        known = {one: KEPT[one] for one in case.path_parameters if one in KEPT}
        case.path_parameters.update(known)
    if name == "join_group":
        case.body["topics"] = ["orders"]
    if isinstance(case.body, dict) and case.body.get("receipt_handle") is not None:
        case.body["receipt_handle"] = kept_receipt(case.body["receipt_handle"])
    if isinstance(case.body, dict) and case.body.get("receipt_handles") is not None:
        case.body["receipt_handles"] = [kept_receipt(one) for one in case.body["receipt_handles"]]
    if name == "reset_group":
        case.body |= KEPT
    if name in ("create_topic", "add_partitions"):
        for field in ("num_partitions", "count", "partitions"):
            if case.body.get(field) is not None:
                case.body[field] = min(case.body[field], PARTITIONS_MAX)


def attack_one(
    operation: APIOperation[Any, Any, Any, Any],
    mode: GenerationMode,
    session: requests.Session,
    statuses: Counter[str],
) -> None:
    name = operation.definition.raw["operationId"]

    @settings(
        max_examples=EXAMPLES[mode],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        if mode is GenerationMode.POSITIVE:
            tame(case, name)
        response = case.call(session=session)
        statuses[f"{name} {response.status_code}"] += 1
        case.validate_response(response, checks=CHECKS)
        if mode is GenerationMode.POSITIVE:
            check_taken(case, response)

    send()


def test_what_the_document_calls_valid_is_taken(base: str) -> None:
    statuses = attack(base, GenerationMode.POSITIVE)
    taken = {name.split()[0] for name in statuses if name.endswith((" 200", " 201"))}
    assert {"create_topic", "publish", "read", "list_delayed", "redrive"} <= taken
    assert {"join_group", "reset_group"} <= taken


def test_what_the_document_calls_wrong_is_refused(base: str) -> None:
    statuses = attack(base, GenerationMode.NEGATIVE)
    assert all(name.split()[1].startswith("4") for name in statuses), json.dumps(statuses)
