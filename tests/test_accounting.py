"""Where the wall time went: a kill costs recovery and lost work, and the parts add up to the whole."""

import pytest

from pipeline.monitoring.accounting import account

pytestmark = pytest.mark.quick


def start(attempt: int, step: int, claimed: float, time: float) -> dict:
    return {"kind": "start", "attempt": attempt, "step": step, "claimed": claimed, "time": time}


def window(attempt: int, step: int, time: float, **changes: float) -> dict:
    values = {"seconds": 10.0, "wait": 0.1, "stalled_s": 0.5, "evaluated_s": 0.0, **changes}
    return {"kind": "train", "attempt": attempt, "step": step, "time": time, "losses": [1.0] * 10, **values}


def test_an_uninterrupted_stage_is_start_data_checkpoint_and_compute() -> None:
    records = [start(1, 0, 100.0, 105.0), window(1, 10, 120.0), window(1, 20, 130.0, evaluated_s=2.0)]
    spent = account(records)
    assert (spent.start, spent.data, spent.checkpoint, spent.compute, spent.other) == (10.0, 2.0, 1.0, 15.0, 2.0)
    assert spent.wall == 30.0 and spent.ratio == pytest.approx(0.5) and spent.lost == spent.recovery == 0
    assert spent.line() == "effective 50.0% of 30s (start 33.3%, other 6.7%, data 6.7%, checkpoint 3.3%)"


def test_what_a_later_attempt_did_again_is_lost_and_the_way_back_is_recovery() -> None:
    """Killed at step 20 with a checkpoint of step 15: half a window is lost, 15 s pass until the next first step."""
    records = [
        start(1, 0, 100.0, 105.0),
        window(1, 10, 120.0),
        window(1, 20, 130.0),
        start(2, 15, 140.0, 143.0),
        window(2, 25, 155.0),
    ]
    spent = account(records)
    assert spent.lost == 5.0 and spent.recovery == 15.0 and spent.compute == pytest.approx(2.5 * 8.5)
    assert spent.wall == pytest.approx(55.0)


def test_an_attempt_after_the_next_may_fall_back_further() -> None:
    records = [start(1, 0, 0.0, 5.0), window(1, 10, 20.0), start(2, 10, 22.0, 25.0), window(2, 20, 40.0)]
    spent = account([*records, start(3, 0, 42.0, 45.0), window(3, 10, 60.0)])
    assert spent.lost == 20.0


def test_a_clock_that_jumps_back_takes_no_time_away() -> None:
    records = [start(1, 0, 4100.0, 105.0), window(1, 20, 130.0), start(2, 20, 140.0, 143.0)]
    back = [{**record, "time": record["time"] - 3600} for record in [records[2], window(2, 30, 155.0)]]
    spent = account([*records[:2], *back])
    assert spent.start == spent.recovery == 0.0 and spent.compute > 0 and spent.ratio < 1


def test_a_stage_that_has_not_begun_has_no_account() -> None:
    assert account([]).ratio == 0.0 and account([start(1, 0, 100.0, 105.0)]).wall == 5.0
