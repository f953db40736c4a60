"""Weights transferred to another image size, patch, pooling or head; every change is reported."""

import json

import numpy as np
import pytest
import torch

import models
from models import positions
from models.catalog import check_weights
from tests.support.golden import GOLDEN, needs_golden

pytestmark = pytest.mark.quick


@needs_golden
@pytest.mark.parametrize("case", range(6))
def test_resized_tables_are_those_of_the_original(case):
    arrays = np.load(GOLDEN / "posemb_resize.npz")
    about = json.loads(str(arrays["cases_json"]))[str(case)]
    grids = [(about[side], about[side]) for side in ("old_grid", "new_grid")]
    old, expected = (torch.from_numpy(arrays[f"{side}_{case}"]) for side in ("in", "out"))
    resized = models.resize_positions(old, *grids, prefix_tokens=int(about["has_class_token"]))
    torch.testing.assert_close(resized, expected.view_as(resized), atol=1e-6, rtol=0)


def test_a_table_of_any_shape_resizes_and_its_prefix_stays():
    table = torch.randn(2 + 6, 4)
    wide = models.resize_positions(table, (2, 3), (5, 1), prefix_tokens=2)
    assert wide.shape == (7, 4)
    assert torch.equal(wide[:2], table[:2])
    torch.testing.assert_close(wide[2], table[2])  # corners stay corners
    single = models.resize_positions(torch.randn(1, 1, 4), (1, 1), (3, 2), prefix_tokens=0)
    assert single.shape == (1, 6, 4)
    assert single.eq(single[:, :1]).all()
    assert torch.equal(models.resize_positions(single, [3, 2], (3, 2), 0), single)
    assert models.resize_positions(torch.randn(9, 4), 3, 2, prefix_tokens=0).shape == (4, 4)  # squares
    with pytest.raises(ValueError, match="new_grid must be one or two positive integers"):
        models.resize_positions(table, (2, 3), (0, 5), prefix_tokens=2)
    with pytest.raises(ValueError, match="8 entries, but grid 2x4 with 1 prefix tokens needs 9"):
        models.resize_positions(table, (2, 4), (5, 1), prefix_tokens=1)


def test_relative_offsets_keep_their_direction():
    # the table holds its own offset as (rows, columns): on a grid twice as fine, offsets count double
    old, new = (3, 3), (5, 5)
    offsets = torch.arange(-8, 9).double()
    dy = (offsets / 3).round()
    table = torch.stack([dy, offsets - 3 * dy], dim=-1)[None]
    resized = positions.resize_relative(table, old, new, 0, 0)[0]
    at = {(dy, dx): resized[24 + 5 * dy + dx] for dy in (-2, 0, 2) for dx in (-2, 0, 2)}
    for (rows, columns), value in at.items():
        assert value.tolist() == [rows / 2, columns / 2]
    torch.testing.assert_close(positions.resize_relative(table, old, old, 0, 0), table)


def test_relative_offsets_of_a_single_row_of_patches_are_steps_along_it():
    # the table holds its own offset in columns: with 5 columns instead of 3, offsets count double
    table = torch.arange(-2, 3).double()[None, :, None]
    resized = positions.resize_relative(table, (1, 3), (1, 5), 0, 0)[0, :, 0]
    assert resized.tolist() == [offset / 2 for offset in range(-4, 5)]
    # the same grid, with and without a class token
    for grid in ((1, 8), (8, 1), (1, 1), (3, 2)):
        for slots in (0, 1):
            entries = torch.randn(1, 2 * (slots + grid[0] * grid[1]) - 1, 4)
            assert torch.equal(positions.resize_relative(entries, grid, grid, slots, slots), entries)


def test_an_enlarged_patch_answers_enlarged_images_as_before():
    small = models.build("mu/4", 16, 5, pool="gap")
    target = models.config_of("mu/8", 32, 5, pool="gap")
    state, report = models.transfer(small.state_dict(), small.config, target)
    large = models.from_config(target)
    large.load_state_dict(state)
    patch = torch.randn(1, 3, 4, 4)
    enlarged = torch.nn.functional.interpolate(patch, size=(8, 8), mode="bilinear")
    answers = [m.embedding(x) for m, x in ((small, patch), (large, enlarged))]
    torch.testing.assert_close(answers[0], answers[1], atol=1e-5, rtol=1e-4)
    assert [name for name, *_ in report.resized] == ["embedding.weight"]


@pytest.mark.parametrize("kind", ["learned", "learned2d", "sincos2d", "relative", "none"])
@pytest.mark.parametrize("at", ["stem", "every", "shared"])
def test_every_position_table_moves_to_another_grid(kind, at):
    options = {"positions": kind, "positions_at": at, "depth": 2, "classes": 5}
    source = models.build("mu/4", (16, 24), **options)
    target = models.config_of("mu/4", (24, 8), **options)
    state, report = models.transfer(source.state_dict(), source.config, target)
    moved = models.from_config(target)
    moved.load_state_dict(state)
    assert moved(torch.zeros(1, 3, 24, 8)).shape == (1, 5)
    tables = {name for name in state if "positions." in name and "slot" not in name}
    assert {name for name, *_ in report.resized} == tables
    assert (report.drift is None) == (kind in ("none", "relative"))


def test_the_report_names_every_parameter_and_prints():
    source = models.build("mu/4", 16, 21, representation=8)
    target = models.config_of("mu/4", 24, 5)
    state, report = models.transfer(source.state_dict(), source.config, target)
    assert [row[0] for row in report.dropped] == [
        "pre_logits.weight",
        "pre_logits.bias",
        "head.weight",
        "head.bias",
    ]
    assert report.resized == (("positions.0.table", (1, 17, 32), (1, 37, 32)),)
    assert report.new == (("head.weight", None, (5, 32)), ("head.bias", None, (5,)))
    assert len(report.kept) + len(report.resized) + len(report.new) == len(state)
    assert state["head.weight"].eq(0).all()
    assert state["head.bias"].eq(0).all()
    assert torch.equal(state["positions.0.table"][:, 0], source.state_dict()["positions.0.table"][:, 0])
    lines = str(report).splitlines()
    assert lines[0] == f"kept {len(report.kept)} parameters unchanged"
    assert "1x17x32 -> 1x37x32" in lines[1]
    assert lines[-1].startswith("similarity of neighbouring positions")
    assert report.drift[1] > report.drift[0]  # interpolation makes neighbours alike


def test_equal_classes_keep_the_head_unless_a_new_one_is_requested():
    source = models.build("mu/4", 16, 5)
    torch.nn.init.ones_(source.head.weight)
    target = models.config_of("mu/4", 24, 5)
    kept, _ = models.transfer(source.state_dict(), source.config, target)
    fresh, report = models.transfer(source.state_dict(), source.config, target, new_head=True)
    assert kept["head.weight"].eq(1).all()
    assert fresh["head.weight"].eq(0).all()
    assert {name for name, *_ in report.dropped} == {"head.weight", "head.bias"}


def test_mean_pooling_drops_the_class_token_and_its_position():
    source = models.build("mu/4", 16, 5)
    state, report = models.transfer(source.state_dict(), source.config, models.config_of("mu/4", 16, 5, pool="gap"))
    assert ("prefix.cls", (1, 1, 32), None) in report.dropped
    assert torch.equal(state["positions.0.table"], source.state_dict()["positions.0.table"][:, 1:])
    back, report = models.transfer(state, models.config_of("mu/4", 16, 5, pool="gap"), source.config)
    assert back["positions.0.table"][:, 0].eq(0).all()
    assert ("prefix.cls", None, (1, 1, 32)) in report.new


@pytest.mark.parametrize("registers", [0, 2])
def test_class_token_entry_is_added_and_removed_in_two_tables_as_in_one(registers):
    options = {"positions": "learned2d", "registers": registers}
    source = models.build("mu/4", 16, 5, **options)
    gap = models.config_of("mu/4", 16, 5, pool="gap", **options)
    entries = source.state_dict()["positions.0.slot"]  # of the class token, then of the registers
    without, _ = models.transfer(source.state_dict(), source.config, gap)
    assert models.transfer(without, gap, source.config)[0].keys() == source.state_dict().keys()
    if registers:
        assert torch.equal(without["positions.0.slot"], entries[:, 1:])
    back, _ = models.transfer(without, gap, source.config)
    expected = torch.cat([torch.zeros(1, 1, 32), entries[:, 1:]], dim=1)
    assert torch.equal(back["positions.0.slot"], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4}, "heads: 2 -> 4"),
        ({"norm_eps": 1e-5}, "norm_eps"),
        ({"depth": 2}, "depth: 1 -> 2"),
        ({"positions": "sincos2d"}, "positions: 'learned' -> 'sincos2d'"),
    ],
)
def test_another_architecture_is_refused(options, message):
    source = models.build("mu/4", 16, 5)
    with pytest.raises(ValueError, match=message):
        models.transfer(source.state_dict(), source.config, models.config_of("mu/4", 16, 5, **options))


def test_missing_unknown_and_misshaped_keys_are_all_listed():
    source = models.build("mu/4", 16, 5)
    weights = {**source.state_dict(), "extra": torch.zeros(3), "norm.bias": torch.zeros(7)}
    del weights["prefix.cls"]
    with pytest.raises(ValueError) as refused:
        models.transfer(weights, source.config, source.config)
    for part in ("wrong keys: 3", "missing prefix.cls 1x1x32", "unknown extra 3", "norm.bias is 7, expected 32"):
        assert part in str(refused.value)


def test_a_resnet_keeps_its_weights_at_another_size():
    source = models.build("BiT-R50x1", 64, 5, units=(1, 1), width=32)
    target = models.config_of("BiT-R50x1", 96, 3, units=(1, 1), width=32)
    state, report = models.transfer(source.state_dict(), source.config, target)
    check_weights(state, target)
    assert report.resized == ()
    assert report.drift is None
    assert len(report.new) == 2
