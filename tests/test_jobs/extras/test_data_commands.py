"""Suggestions for mistyped paths; SIGTERM ends a block with Preempted, and the previous handler is restored."""

import os
import signal
from pathlib import Path

import pytest

from data.errors import Preempted
from jobs.__main__ import main
from jobs.extras.data_commands import near_path, stoppable

pytestmark = pytest.mark.quick


def test_sigterm_ends_the_block_and_restores_the_previous_handler():
    before = signal.getsignal(signal.SIGTERM)
    reached = []
    with pytest.raises(Preempted, match="run the same command again"), stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("the next line")
    assert reached == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_previous_handler_is_restored_without_a_signal():
    before = signal.getsignal(signal.SIGTERM)
    with stoppable():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("target", ["gone.yaml", "link.yaml"])
@pytest.mark.parametrize(
    "words", ["plan link.yaml", "pack folder link.yaml out", "predict link.yaml out", "new link.yaml"]
)
def test_a_broken_link_is_reported_with_its_target(words, target, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("link.yaml").symlink_to(target)
    assert main(words.split()) != 0
    error = capsys.readouterr().err
    assert f"is a symbolic link to {target}, which does not exist or leads back to the link" in error
    assert "did you mean 'link.yaml'" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml"]


def test_a_similar_name_is_suggested(tmp_path):
    (tmp_path / "photos").mkdir()
    assert near_path(f"{tmp_path}/photso") == f"; did you mean '{tmp_path}/photos'?"
    assert near_path(f"{tmp_path}/elephant") == ""
