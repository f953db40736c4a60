"""Run a command with --json, and check its document against the schema in docs/schemas."""

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from jobs.__main__ import main

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def schema_of(name: str) -> Any:
    """Return a schema by the name in a document, such as "status.1"."""
    return json.loads((SCHEMAS / f"{name}.json").read_text())


def check(document: Mapping[str, Any]) -> None:
    """Assert that a document follows its schema, and that the schema describes all of its fields."""
    schema = schema_of(document["schema"])
    jsonschema.Draft202012Validator(schema).validate(document)
    undescribed(document, schema, document["schema"])


def undescribed(value: Any, schema: Mapping[str, Any], place: str) -> None:
    """Assert that the properties of every object are described by its schema."""
    if isinstance(value, dict) and "properties" in schema:
        assert set(value) <= set(schema["properties"]), f"{place} has fields without a description"
        for name, entry in value.items():
            undescribed(entry, schema["properties"][name], f"{place}.{name}")
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        for name, entry in value.items():
            undescribed(entry, schema["additionalProperties"], f"{place}.{name}")
    elif isinstance(value, list) and "items" in schema:
        for entry in value:
            undescribed(entry, schema["items"], place)


def document_of(words: Sequence[str]) -> dict[str, Any]:
    """Run a command in this process with --json; return the only document on stdout after checking it."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main([*words, "--json"])
    lines = out.getvalue().splitlines()
    assert len(lines) == 1, "stdout has the document and nothing else"
    document: dict[str, Any] = json.loads(lines[0])
    assert document["code"] == code
    if document["schema"] != "error.1":  # an error's document can have fields of its command
        check(document)
    else:
        jsonschema.Draft202012Validator(schema_of("error.1")).validate(document)
    return document
