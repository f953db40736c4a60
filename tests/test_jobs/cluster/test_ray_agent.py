"""The Prometheus gauge of an agent (with real workers: test_worker_group.py, test_gauges.py)."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from jobs.cluster import agent, ray_agent
from jobs.cluster.agent import WorkerState
from jobs.cluster.ray_agent import RayAgent
from tests.support.families import wait_until

pytestmark = pytest.mark.quick


@pytest.fixture
def shown(monkeypatch) -> list[dict[str, str]]:
    """Record the tags of the gauge in the order they are set; Ray's real gauge needs a cluster."""
    tags_set: list[dict[str, str]] = []

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert name == "patchline_worker"

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert value == 1.0
            tags_set.append(tags)

    monkeypatch.setattr(ray_agent, "Gauge", Gauge)
    return tags_set


@pytest.fixture
def under_test(shown, tmp_path, monkeypatch) -> Iterator[RayAgent]:
    monkeypatch.setattr(agent, "MEMORY", tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    made = RayAgent(has_gpus=False)
    yield made
    signal.signal(signal.SIGTERM, before)
    made.close()


def test_gauge_shows_workers_at_once_by_run_stage_and_rank(under_test, shown, tmp_path) -> None:
    assert shown == []
    with under_test.changed:
        under_test.folder = tmp_path / "digits" / "pretrain-4f1a" / "attempts" / "attempt-000001"
        under_test.workers = {2: WorkerState(2), 3: WorkerState(3)}
        under_test.news += 1
        under_test.changed.notify_all()
    wait_until(lambda: len(shown) == 2, 5)
    assert shown == [{"run": "digits", "stage": "pretrain", "rank": rank} for rank in ("2", "3")]


def test_agent_survives_the_signal_that_ends_a_node(under_test) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_calling_an_agent_returns_a_future() -> None:
    calls: list[tuple[Any, ...]] = []

    class Method:
        def remote(self, *arguments: object) -> "Method":
            calls.append(arguments)
            return self

        def future(self) -> str:
            return "future"

    class Actor:
        poll = Method()

    assert ray_agent.call_actor(Actor(), "poll", 0, 1.0) == "future"
    assert calls == [(0, 1.0)]
