"""SIGTERM ends a block with Preempted, and the previous handler is restored."""

import os
import signal

import pytest

from data.errors import Preempted
from jobs.extras.data_commands import stoppable

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
