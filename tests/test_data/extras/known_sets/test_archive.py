"""A public data set with an unexpected size is rejected before its index is written."""

import pytest

from data.extras.known_sets.known import known_archive
from data.extras.sources.samples import Published
from jobs.__main__ import main
from tests.support import archives
from tests.support.archives import contents

pytestmark = pytest.mark.quick


def test_set_with_unpublished_size_is_rejected_before_its_index_is_written(tmp_path, monkeypatch, capsys, caplog):
    folder = archives.pets(tmp_path / "pets")
    command = ["pack", "pets", str(folder), str(tmp_path / "set"), "--split", "test"]
    published = known_archive("pets").published
    monkeypatch.setitem(published, "test", Published(6, 3, "by hand"))
    assert main(command) == 0
    monkeypatch.setitem(published, "test", Published(7, 3, "by hand"))
    assert main([*command[:3], str(tmp_path / "seven"), *command[4:]]) == 65
    said = capsys.readouterr().err
    assert "pets, test: found 6 samples of 3 classes, expected 7 samples of 3 classes (by hand)" in said
    assert "--partial" in said
    assert not list((tmp_path / "seven").glob("*.index.json"))
    assert main([*command[:3], str(tmp_path / "seven"), *command[4:], "--partial"]) == 0
    assert "found 6 samples of 3 classes, expected 7" in caplog.text
    assert contents(tmp_path / "seven") == contents(tmp_path / "set")
    monkeypatch.setitem(published, "test", Published(6, 37, "by hand"))
    assert main([*command[:3], str(tmp_path / "more"), *command[4:]]) == 65
    assert "pets, test: found 3 classes, expected 6 samples of 37 classes" in capsys.readouterr().err
