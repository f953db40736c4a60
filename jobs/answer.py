"""The answer of a command: a document, and the function that renders it as lines for people.

    return Answer({"jobs": [{"id": "digits-001-4f1a", "status": "RUNNING"}]}, job_lines)

    patchline list           digits-001-4f1a RUNNING           the lines of job_lines(document)
    patchline list --json    {"schema": "list.1", "code": 0, "jobs": [{"id": "digits-001-4f1a", …}]}

Both outputs come from the same document: `render` has no other argument. tests/test_documents.py checks that the lines
rendered from the parsed JSON equal the lines that the command prints. The fields of each document are in
docs/schemas; a field is never renamed or removed without a new version of the schema.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Document: TypeAlias = Mapping[str, Any]
Step: TypeAlias = dict[str, Any]  # what to do next after an error; see docs/schemas/error.1.json


def report_lines(document: Document) -> list[str]:
    """Return the lines of a document's "report" entry, for documents that include a human-readable version."""
    lines: list[str] = document["report"]
    return lines


@dataclass(frozen=True)
class Answer:
    """A command's result: a document of plain values, and the function that renders it.

    If `render` is None, the command has already printed its lines, as `run` does. If only --json needs the document,
    `document` can be a function that returns it.
    """

    document: Document | Callable[[], Document]
    render: Callable[[Document], Iterable[str]] | None = None
    code: int = 0  # exit code
    version: int = 1  # version of the document's schema
    is_table: bool = False  # the lines have tabs, and are printed unwrapped

    def content(self) -> Document:
        """Return the document."""
        return self.document() if callable(self.document) else self.document

    def lines(self) -> Iterable[str]:
        """Return the lines for people."""
        return () if self.render is None else self.render(self.content())
