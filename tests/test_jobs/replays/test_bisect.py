"""What `bisect` refuses before it looks for a run."""

from pathlib import Path

import pytest

from jobs.__main__ import main

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("shards limit=abc", "limit=abc: expected a number"),
        ("step=3 limit=0.7", "limit=X is of shards"),
        ("step=3 shards", "expected one of them"),
        ("step=3 shard", "'shard' is not understood"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: str, said: str, tmp_path: Path, capsys) -> None:
    assert main(["bisect", str(tmp_path), *words.split()]) == 64
    assert said in capsys.readouterr().err
