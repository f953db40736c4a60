"""Every tested pair of torch and DeepSpeed computes the bits of plain torch; the table names the pairs that do not.

PATCHLINE_VERSIONS=.versions pytest -m slow tests/test_benchmarks/test_versions.py      the tested pairs in .versions
"""

import os
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks import versions
from benchmarks.versions import CASES, Outcome
from pipeline.extras.engine_check.versions import TESTED

RECORDED = Path(versions.__file__).parent / "results" / "versions.json"
FOLDER = os.environ.get("PATCHLINE_VERSIONS")
PAIRS = [("installed", Path(sys.executable), None)]
if FOLDER:
    PAIRS = [pair for pair in versions.pairs_in(Path(FOLDER)) if pair[0].split("=")[1] in TESTED["deepspeed"]]
DOCUMENT = Path(versions.__file__).parents[1] / "docs" / "design" / "engine-check.md"

LOSSES = [value.hex() for value in (2.0, 1.5, 1.25)]
EQUAL = Outcome("2.13.0", "0.19.8", "fp32", 0, LOSSES, "a", LOSSES, "a", [])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_losses_and_weights_have_the_bits_of_plain_torch_at_every_stage(pair) -> None:
    outcomes = versions.run_pair(*pair[1:])
    verdicts = {(outcome.precision, outcome.zero): (outcome.verdict, outcome.error) for outcome in outcomes}
    assert verdicts == dict.fromkeys(CASES, ("equal", ""))


@pytest.mark.quick
def test_each_tested_pair_has_a_recorded_result_at_every_stage() -> None:
    verdicts = {}
    for outcome in versions.read_results(RECORDED):
        release = outcome.torch.partition("+")[0]
        verdicts[release, outcome.deepspeed, outcome.precision, outcome.zero] = outcome.verdict
    for torch, deepspeed, (precision, zero) in product(TESTED["torch"], TESTED["deepspeed"], CASES):
        assert verdicts[torch, deepspeed, precision, zero] == "equal"


@pytest.mark.quick
def test_document_has_the_row_of_each_recorded_pair() -> None:
    rows = [line for line in versions.table(versions.read_results(RECORDED)).splitlines() if line.startswith("|")]
    assert "\n".join(rows) in DOCUMENT.read_text()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "equal"),
        ({"weights": "b"}, "equal losses, other weights"),
        ({"losses": [LOSSES[0], (1.5 * (1 + 2**-20)).hex(), LOSSES[2]]}, "from step 2, up to 1e-06"),
        ({"refused": ["the gradient norm in step 1 is 2, expected 1"]}, "refused"),
        ({"error": "AttributeError", "losses": []}, "cannot run"),
    ],
)
def test_verdict_names_the_first_step_and_the_largest_difference(changes, verdict) -> None:
    assert replace(EQUAL, **changes).verdict == verdict


@pytest.mark.quick
def test_table_has_a_row_for_each_pair_and_the_words_of_refusals_and_errors() -> None:
    others = [
        replace(EQUAL, deepspeed="0.19.2", precision="bf16", zero=1, refused=["the norm is 2", "the update is 3"]),
        replace(EQUAL, torch="2.15.0", zero=3, error="worker 0:\n  no such name", plain_losses=[(1.0).hex()] * 3),
    ]
    lines = versions.table([EQUAL, *others]).splitlines()
    assert lines[2] == "| 2.13.0 | 0.19.8 | equal" + " | not run" * 6 + " |"
    assert lines[3] == "| 2.13.0 | 0.19.2" + " | not run" * 4 + " | refused" + " | not run" * 2 + " |"
    assert lines[4] == "| 2.15.0 | 0.19.8" + " | not run" * 3 + " | cannot run" + " | not run" * 3 + " |"
    assert "- torch 2.13.0, DeepSpeed 0.19.2, bf16 ZeRO 1: refused: the norm is 2" in lines
    assert "- torch 2.15.0, DeepSpeed 0.19.8, fp32 ZeRO 3: cannot run: worker 0: no such name" in lines
