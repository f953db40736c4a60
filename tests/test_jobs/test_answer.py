"""The answer of a command: the lines come from the document, which is only made if it is needed."""

import pytest

from jobs.answer import Answer, report_lines

pytestmark = pytest.mark.quick


def test_lines_are_rendered_from_the_document() -> None:
    answer = Answer({"report": ["a", "b"]}, report_lines)
    assert list(answer.lines()) == answer.content()["report"] == ["a", "b"]


def test_a_document_without_lines_is_made_only_for_json() -> None:
    calls = []
    answer = Answer(lambda: calls.append(1) or {"run": "x"})
    assert list(answer.lines()) == calls == []
    assert answer.content() == {"run": "x"}
    assert calls == [1]
