"""The answer of a command: one document, and the function that renders it as lines for people.

    return Answer({"jobs": [{"id": "digits-001-4f1a", "status": "RUNNING"}]}, job_lines)

    patchline list           digits-001-4f1a RUNNING           the lines of job_lines(document)
    patchline list --json    {"schema": "list.1", "code": 0, "jobs": [{"id": "digits-001-4f1a", …}]}

Both outputs come from the same document: `render` gets nothing else. tests/test_jobs/test_answer.py checks that the
lines rendered from the parsed JSON are the lines that the command prints. The fields of each document are in
docs/schemas; a field is never renamed or removed without a new version of the schema.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Document: TypeAlias = Mapping[str, Any]
Step: TypeAlias = dict[str, Any]  # what to do next after an error; see docs/schemas/error.1.json


def no_lines(document: Document) -> Sequence[str]:
    """Render nothing, for a command that has already printed its lines, such as `run`."""
    return ()


@dataclass(frozen=True)
class Answer:
    """A command's result: strings, numbers, booleans, lists and mappings, and the function that renders them."""

    document: Document
    render: Callable[[Document], Iterable[str]] = no_lines
    code: int = 0  # exit code
    version: int = 1  # version of the document's schema
