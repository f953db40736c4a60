"""How often, and after which pauses, a request to a store is retried; the tests use a fake clock."""

import logging
from itertools import pairwise
from types import SimpleNamespace

import pytest

from data.errors import DataError, StorageError
from data.remote import urls
from data.remote.urls import LONGEST_PAUSE_S, WARN_AT_ATTEMPT, Retry

pytestmark = pytest.mark.quick


class Clock:
    """Seconds that pass only in sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 500.0
        self.pauses: list[float] = []  # the longest possible draw
        monkeypatch.setattr(urls, "time", SimpleNamespace(monotonic=lambda: self.seconds, sleep=self.sleep))
        monkeypatch.setattr(urls, "random", SimpleNamespace(uniform=self.uniform))

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def uniform(self, low: float, high: float) -> float:
        self.pauses.append(high)
        return high


@pytest.mark.parametrize(
    ("attempts", "failures", "pauses"),
    [
        (1, 0, []),
        (1, 1, []),
        (2, 1, [0.5]),
        (2, 2, [0.5]),
        (5, 4, [0.5, 1, 2, 4]),
        (10, 10, [0.5, 1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]),
    ],
)
def test_requests_to_a_store_are_retried_after_doubling_pauses(attempts, failures, pauses, monkeypatch, caplog) -> None:
    clock = Clock(monkeypatch)
    asked: list[float] = []

    def ask() -> str:
        asked.append(clock.seconds)
        if len(asked) <= failures:
            raise TimeoutError("slow")
        return "answer"

    with caplog.at_level(logging.WARNING):
        if failures < attempts:
            assert Retry(attempts, 0.5).patiently("s3://set", ask) == "answer"
        else:
            with pytest.raises(
                StorageError, match=f"^s3://set: no response after {attempts} attempts, last error TimeoutError; run"
            ):
                Retry(attempts, 0.5).patiently("s3://set", ask)
    assert clock.pauses == pauses
    assert clock.seconds == asked[-1]
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert waits == pytest.approx(pauses)
    assert len(caplog.messages) == (failures > WARN_AT_ATTEMPT)


def test_stop_is_noticed_within_a_tenth_of_a_second(monkeypatch) -> None:
    clock = Clock(monkeypatch)

    def ask() -> None:
        raise ConnectionError("gone")

    with pytest.raises(StorageError, match=r"^s3://set: stopped before the response arrived$"):
        Retry(8, 20.0, lambda: clock.seconds >= 507.25).patiently("s3://set", ask)
    assert 507.25 <= clock.seconds < 507.36


@pytest.mark.parametrize("error", [FileNotFoundError("no"), DataError("refused")])
def test_files_missing_from_a_new_attempt_are_requested_once(error, monkeypatch) -> None:
    clock = Clock(monkeypatch)

    def ask() -> None:
        raise error

    with pytest.raises(type(error)):
        Retry(8, 0.5).patiently("s3://set", ask)
    assert clock.pauses == []
