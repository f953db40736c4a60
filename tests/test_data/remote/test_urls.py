"""How often, and after which pauses, a request to a store is retried; the tests use a fake clock."""

import logging
from itertools import pairwise
from types import SimpleNamespace

import pytest

from data.errors import DataError, StorageError
from data.remote import urls
from data.remote.urls import LONGEST_PAUSE_S, WARN_AT_ATTEMPT, Retry, Throttled

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
            assert Retry(attempts, 0.5).with_retries("s3://set", ask) == "answer"
        else:
            with pytest.raises(
                StorageError,
                match=f"^s3://set: no response after {attempts} attempts, the last error was TimeoutError; run",
            ):
                Retry(attempts, 0.5).with_retries("s3://set", ask)
    assert clock.pauses == pauses
    assert clock.seconds == asked[-1]
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert waits == pytest.approx(pauses)
    assert len(caplog.messages) == (failures > WARN_AT_ATTEMPT)


def test_requested_pauses_are_respected_and_do_not_count_as_attempts(monkeypatch, caplog) -> None:
    clock = Clock(monkeypatch)
    asked: list[float] = []
    waited: list[float] = []

    def ask() -> str:
        asked.append(clock.seconds)
        if len(asked) <= 3:
            raise Throttled(40.0)
        return "answer"

    retry = Retry(1, 0.5, waiting=lambda: waited.append(clock.seconds))
    with caplog.at_level(logging.WARNING):
        assert retry.with_retries("hf://set", ask) == "answer"
    # The draws are the longest possible here: a quarter of the pause.
    assert [later - earlier for earlier, later in pairwise(asked)] == pytest.approx([50.0] * 3)
    assert max(later - earlier for earlier, later in pairwise(waited)) < 0.11
    assert caplog.messages == ["hf://set: the store limits the rate of requests; waiting 40 s, as it requests"]


def test_store_that_only_asks_for_pauses_ends_the_request(monkeypatch) -> None:
    clock = Clock(monkeypatch)

    def ask() -> str:
        raise Throttled(600.0)

    with pytest.raises(StorageError, match=r"^hf://set: the store limits the rate .* 600 s after 3600 s of pauses"):
        Retry(1, 0.5).with_retries("hf://set", ask)
    assert 3600 <= clock.seconds - 500 <= 3600 * 1.25 + 1


@pytest.mark.parametrize(
    ("headers", "pause_s"),
    [
        ({"Retry-After": "120"}, 120.0),
        ({"Retry-After": "Thu, 01 Jan 1970 00:08:50 GMT"}, 30.0),  # the clock shows 500 s
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        ({"RateLimit": '"resolvers";r=0;t=55', "RateLimit-Policy": '"fixed window";"resolvers";q=5000;w=300'}, 55.0),
        ({"RateLimit": '"resolvers";r=12;t=55'}, None),
        ({"Retry-After": "soon"}, None),
        ({}, None),
    ],
)
def test_pause_is_read_from_the_headers(headers, pause_s, monkeypatch) -> None:
    monkeypatch.setattr(urls, "time", SimpleNamespace(time=lambda: 500.0))
    assert urls.pause_in(headers) == pause_s


def test_stop_is_noticed_within_a_tenth_of_a_second(monkeypatch) -> None:
    clock = Clock(monkeypatch)

    def ask() -> None:
        raise ConnectionError("gone")

    with pytest.raises(StorageError, match=r"^s3://set: stopped before the response arrived$"):
        Retry(8, 20.0, lambda: clock.seconds >= 507.25).with_retries("s3://set", ask)
    assert 507.25 <= clock.seconds < 507.36


@pytest.mark.parametrize("error", [FileNotFoundError("no"), DataError("refused")])
def test_files_missing_from_a_new_attempt_are_requested_once(error, monkeypatch) -> None:
    clock = Clock(monkeypatch)

    def ask() -> None:
        raise error

    with pytest.raises(type(error)):
        Retry(8, 0.5).with_retries("s3://set", ask)
    assert clock.pauses == []
