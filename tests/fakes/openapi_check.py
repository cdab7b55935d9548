"""Answers against the OpenAPI document, more strictly than JSON Schema: what is not documented must
not be there."""

import re
from typing import Any

KINDS = {
    "object": dict, "array": list, "string": str, "integer": int, "boolean": bool,
    "null": type(None),
}  # fmt: skip
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def conforms(schema: dict[str, Any], value: Any, place: str) -> None:
    """A value against the part of JSON Schema that answers use."""
    if "anyOf" in schema:
        fitting = [one for one in schema["anyOf"] if type(value) is KINDS[one["type"]]]
        assert fitting, f"{place}: {value!r}"
        schema = fitting[0]
    if "type" in schema and schema["type"] != "number":
        assert type(value) is KINDS[schema["type"]], f"{place}: {value!r}"
    if "enum" in schema:
        assert value in schema["enum"], f"{place}: {value!r}"
    if schema.get("format") == "date-time":
        assert TIME.fullmatch(value), f"{place}: {value!r}"
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties")
        missing = set(schema.get("required", ())) - set(value)
        assert not missing, f"{place}: {missing}"
        for name, item in value.items():
            one = known.get(name, more if isinstance(more, dict) else None)
            assert one is not None or more is True, f"{place}.{name} is not documented"
            if one is not None:
                conforms(one, item, f"{place}.{name}")
    if isinstance(value, list):
        for at, item in enumerate(value):
            conforms(schema["items"], item, f"{place}[{at}]")


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By "METHOD /path"."""
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
