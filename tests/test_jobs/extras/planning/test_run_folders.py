"""A temporary folder in a run directory is always removed."""

import os
import signal

import pytest

from data.errors import ConfigError
from jobs.extras.planning.run_folders import temporary_run

pytestmark = pytest.mark.quick


def test_a_new_run_directory_is_removed_with_its_temporary_folder(tmp_path) -> None:
    run = tmp_path / "new" / "run"
    with temporary_run(run) as folder:
        assert folder.parent == run
    assert not run.exists()


def test_an_existing_run_directory_is_kept(tmp_path) -> None:
    with pytest.raises(ConfigError), temporary_run(tmp_path):
        raise ConfigError("an error in the block")
    assert tmp_path.exists()
    assert list(tmp_path.iterdir()) == []


def test_sigterm_during_the_block_removes_the_folder(tmp_path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), temporary_run(tmp_path / "run"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) is before
