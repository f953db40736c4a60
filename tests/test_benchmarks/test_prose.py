"""The counts of `benchmarks/prose.py`, on texts whose phrases were counted by hand."""

import ast
from pathlib import Path

import pytest

from benchmarks.prose import Text, comments, docstrings, documents, messages, rates

pytestmark = pytest.mark.quick

SOURCE = '''
"""Raise an error where the file is missing.

    if an example: it does not count
"""

# Of a run the files
# that are left.
number = 1  # if it is set


def read(path):
    """Read what lies beside `if` it goes on."""
    log(f"{path}: asked where it is")
    raise ValueError("the file that is there " f"has {number} rows")
'''


def test_docstrings_and_comments_are_read_without_examples_and_code() -> None:
    tree = ast.parse(SOURCE)
    texts = [text.words for text in docstrings(Path("x.py"), tree)]
    assert texts[0].strip() == "Raise an error where the file is missing."
    assert texts[1] == "Read what lies beside … it goes on."
    words = [text.words for text in comments(Path("x.py"), SOURCE)]
    assert words == ["Of a run the files that are left.", "if it is set"]


def test_messages_are_the_literal_text_of_errors_and_logs() -> None:
    texts = [text.words for text in messages(Path("x.py"), ast.parse(SOURCE))]
    assert sorted(texts) == ["the file that is there has … rows", "…: asked where it is"]


def test_rates_are_per_10_000_words() -> None:
    words = "Of a run the part that is left where it lies. If so, it goes on beside it."
    counts = rates([Text("x", words)])
    assert counts["words"] == 18
    once = 10_000 / 18
    assert counts['"where" as a condition'] == once
    assert counts['"if"'] == once
    assert counts['"that is, are, has, have, was, were"'] == once
    assert counts['"beside"'] == once
    assert counts['"goes on, go on"'] == once
    assert counts['sentences that begin with "Of a"'] == once
    assert counts['"behind"'] == 0


def test_code_blocks_of_documents_do_not_count() -> None:
    page = "# Title\n\nIf this `if` counts.\n\n```\nif not this\n```\n"
    assert [text.words for text in documents(Path("x.md"), page)][1] == "If this … counts."
