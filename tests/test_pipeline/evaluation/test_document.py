"""The document of an evaluation: values, intervals and leaks of a result, and the table that people read."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data.index.index import Index
from data.index.shard import Shard
from pipeline.evaluation import document
from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.intervals import over_draws
from pipeline.evaluation.probes import FewShotConfig, Outcome
from pipeline.evaluation.protocols import protocols_of
from tests.support.evaluated_sets import NAMES, store_of, unreadable

pytestmark = pytest.mark.quick


def test_interval_of_a_share_matches_a_hand_calculation() -> None:
    # 8 of 10: (0.8 + 1.9208/10 ± 1.96 √(0.16/10 + 0.9604/100)) / (1 + 3.8416/10)
    entry = document.share_entry(8, 10)
    assert (entry["low"], entry["high"]) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert document.share_entry(0, 0) == {"value": 0.0, "low": 0.0, "high": 1.0, "samples": 0}


def test_few_shot_reports_mean_deviation_and_interval_of_its_seeds(tmp_path: Path) -> None:
    """Use seeds other than 0, 1, 2, an unreadable test sample, and three leaked samples, one of them unreadable."""
    store = unreadable(None, np.zeros(120, int), tmp_path, [7])
    right = np.random.default_rng(4).random((3, 119)) < [[0.5], [0.6], [0.9]]
    (protocol,) = protocols_of(("fewshot",), SimpleNamespace(fewshot=FewShotConfig((1,), (3, 4, 5))), {})
    result = document.result_of(Outcome({"1shot": list(right)}), protocol, store, None, [2, 7, 100])
    clean = np.delete(right, [2, 99], axis=1)
    entries = (result["values"]["1shot"], right), (result["leaks"]["values"]["1shot"], clean)
    assert result["leaks"]["leaked"] == 2
    for entry, expected in entries:
        shares = expected.mean(1)
        assert (entry["value"], entry["sd"]) == pytest.approx((shares.mean(), shares.std(ddof=1)))
        assert (entry["low"], entry["high"]) == over_draws(expected)
        assert entry["seeds"] == pytest.approx(dict(zip("345", shares, strict=True)))
        assert entry["samples"] == expected.shape[1]
        assert entry["interval"] == "95 %, over 3 draws and test samples"
    assert np.array_equal(document.right_of(entries[0][0]), right)


def test_single_draw_says_that_its_variance_is_unknown(tmp_path: Path) -> None:
    store = store_of(None, np.zeros(10, int), tmp_path)
    (protocol,) = protocols_of(("fewshot",), SimpleNamespace(fewshot=FewShotConfig((1,), (7,))), {})
    entry = document.result_of(Outcome({"1shot": [np.arange(10) < 8]}), protocol, store, None, None)["values"]["1shot"]
    assert (entry["low"], entry["high"]) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert "sd" not in entry
    assert "a single draw cannot show the variance between draws" in entry["interval"]
    assert entry["seeds"] == {"7": 0.8}


def test_shots_are_listed_by_shard_and_position(tmp_path: Path) -> None:
    """Use shards of 4, 1 and 7 samples, two seeds and two values."""
    shards = tuple(Shard(f"{name}.tar", count, 0, "") for name, count in (("a", 4), ("b", 1), ("c", 7)))
    train = FeatureStore(Index(shards, 10, (), "d" * 64, "", Path(), names=NAMES), tmp_path)
    test = store_of(None, np.zeros(5, int), tmp_path)
    (protocol,) = protocols_of(("fewshot",), SimpleNamespace(fewshot=FewShotConfig((1, 2), (3, 4))), {})
    right = [np.ones(5, bool)] * 2
    shots = {"1shot": {"3": [0, 3, 4], "4": [5, 11]}, "2shot": {"3": [11, 6], "4": [1]}}
    result = document.result_of(Outcome({"1shot": right, "2shot": right}, shots), protocol, test, train, None)
    assert result["shots"] == {
        "1shot": {"3": [[0, 0], [0, 3], [1, 0]], "4": [[2, 0], [2, 6]]},
        "2shot": {"3": [[2, 6], [2, 1]], "4": [[0, 1]]},
    }


def results_of_two_sets() -> dict:
    """Return a document like evaluation.json with two sets, one of which was compared with a training set."""
    share = {"value": 0.8, "low": 0.4902, "high": 0.9433, "samples": 10}
    draws = {"value": 0.5, "low": 0.25, "high": 0.75, "samples": 1200, "sd": 0.0123, "seeds": {"3": 0.4, "5": 0.6}}
    leaks = {
        "leaked": 2,
        "train": [{"digest": "e" * 64}],
        "checked": [{"path": "/train", "digest": "e" * 64}],
        "not_checked": [{"path": "/more", "digest": "f" * 64}],
        "values": {"top-1": {"value": 0.75}},
    }
    return {
        "weights": {"trained_on": {"sets": [{"digest": "b" * 64}], "unknown": ""}},
        "results": [
            {"set": {"name": "pets", "digest": "a" * 64, "samples": 10}, "values": {"top-1": share}, "leaks": leaks},
            {
                "set": {"name": "flowers", "digest": "b" * 64, "samples": 1300},
                "values": {"5shot": draws, "1shot": {**draws, "seeds": {"3": 0.5}}},
                "leaks": "not checked",
            },
        ],
    }


def test_table_of_a_document_word_for_word() -> None:
    whole = results_of_two_sets()
    del whole["results"][1]["values"]["1shot"]["sd"]
    verdict = "75.00% without 2 samples shared with eeeeeeee; /more (ffffffff) not checked"
    learned = "the weights were trained on this set; not checked"
    lines: list[str] = []
    document.log_table(whole, lines.append)
    assert lines == [
        "set      protocol  value   95 % interval     sd        samples  leaks",
        f"pets     top-1     80.00%  49.02% to 94.33%  -         10       {verdict}",
        f"flowers  5shot     50.00%  25.00% to 75.00%  ± 1.23%   1,200    {learned}",
        f"flowers  1shot     50.00%  25.00% to 75.00%  one draw  1,200    {learned}",
    ]


def test_values_of_several_sets_have_the_set_name_and_whether_all_samples_were_read() -> None:
    whole = results_of_two_sets()
    entries = document.entries_of(whole)
    assert {name: entry["whole"] for name, entry in entries.items()} == {
        "pets top-1": "a" * 64,
        "flowers 5shot": "",
        "flowers 1shot": "",
    }
    assert list(document.entries_of({**whole, "results": whole["results"][1:]})) == ["5shot", "1shot"]
    assert document.metrics_with_seeds(whole["results"][1]) == {
        "5shot-seed-3": 0.4,
        "5shot-seed-5": 0.6,
        "5shot": 0.5,
        "1shot-seed-3": 0.5,
        "1shot": 0.5,
    }


def test_values_are_reported_with_and_without_leaked_samples(tmp_path: Path) -> None:
    numbers = [3, 45, 46, 149]
    store = unreadable(None, np.zeros(150, int), tmp_path, [77])
    is_right = np.zeros(149, bool)
    is_right[[3, 45, 46, 148]] = True  # row 148 of the readable samples is sample 149
    (protocol,) = protocols_of(("top-1",), None, {})
    result = document.result_of(Outcome({"top-1": [is_right]}), protocol, store, None, numbers)
    assert result["values"]["top-1"]["value"] == 4 / 149
    without = result["leaks"]["values"]["top-1"]
    assert (result["leaks"]["leaked"], without["value"], without["samples"]) == (4, 0.0, 145)
