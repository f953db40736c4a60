"""The search for slow workers is on by default, a recipe can turn it off, and the driver prints what it finds."""

import json
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from jobs.extras.slow_worker import SlowWorkerExtra
from jobs.run.reading import StatusMessage
from jobs.run.session import run_campaign
from pipeline.checkpoints.manifest import attempt_folder
from pipeline.config import tagged
from pipeline.hooks import build_config, load_classes
from tests.support import campaigns
from tests.support.watching import EachPoll

CONTEXT: Any = None  # not used


def test_search_is_on_by_default_and_can_be_turned_off():
    extra = SlowWorkerExtra()
    hooks = extra.hooks(extra.config(steps=1), CONTEXT)
    (hook,) = load_classes(hooks)
    assert hook.Config is extra.config
    assert extra.hooks(extra.config(steps=1, name_slow_workers=False), CONTEXT) == {}
    # A replay trains with a config that does not have the key.
    without_key: Any = SimpleNamespace()
    assert extra.hooks(without_key, CONTEXT) == {}


def test_key_may_change_on_resume():
    config = build_config({"steps": 1, "name_slow_workers": False}, [SlowWorkerExtra.hook])
    assert "name_slow_workers" in tagged(config, "free")


@pytest.mark.slow
def test_worker_at_a_tenth_of_its_speed_is_named_with_host_and_factor(recipe, capsys) -> None:
    """SIGSTOP and SIGCONT in turns: worker 1 runs 20 ms of every 200 ms until the log names it."""
    has_ended = threading.Event()
    lines: list[str] = []

    def throttle(pid: int) -> None:
        process = psutil.Process(pid)
        while not has_ended.is_set():
            process.suspend()
            time.sleep(0.18)
            process.resume()
            time.sleep(0.02)

    threads: list[threading.Thread] = []

    def look(message: StatusMessage) -> None:
        records = sorted(attempt_folder(message.directory, message.attempt).glob("rank-*.json"))
        if len(records) == 2 and message.step >= 1 and not threads:
            pid = json.loads(records[1].read_text())["pid"]
            threads.append(threading.Thread(target=throttle, args=(pid,)))
            threads[0].start()
        lines.extend(line for line in capsys.readouterr().out.splitlines() if " times as long as the others " in line)
        if lines:
            has_ended.set()

    changes = ["cluster.backend=processes", "pretrain.save_every=100000", "pretrain.log_every=1", "pretrain.steps=250"]
    try:
        loaded = campaigns.load(recipe, [*changes, "cluster.workers=2", "pretrain.micro_batch=1"])
        run_campaign(loaded, only="pretrain", watchers=[EachPoll(look)])
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()
    named = [line for line in lines if f"worker 1 on {os.uname().nodename} takes" in line]
    assert named, lines
    print(named[0])
    assert "because of other use of its processors: " in named[0]
    assert 2 <= float(named[0].split(" takes ")[1].split()[0]) < 100
