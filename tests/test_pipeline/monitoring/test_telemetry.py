"""Log lines and metrics: writing and reading."""

import math
import subprocess
import time
from pathlib import Path

import pytest
import torch

from data.errors import DataError
from jobs.stage_folders import last_metrics
from pipeline.monitoring.telemetry import (
    Telemetry,
    Window,
    damaged_lines,
    log_line,
    memory_gb,
    peak_flops,
    read_metrics,
)

pytestmark = pytest.mark.quick

REPORT = {"step": 120_000, "steps": 700_000, "loss": 2.841, "lr": 7.1e-4, "grad_norm": 0.42, "images_per_s": 41_200.0}
REPORT |= {"world": 16, "mfu": 0.47, "wait": 0.008, "memory_gb": 61.0, "eta_s": 3.2 * 86400, "losses": [2.9, 2.841]}
REPORT |= {"seconds": 24.0, "stalled_s": 0.5, "evaluated_s": 0.0}


def test_log_line_has_fixed_order_and_readable_numbers():
    line = "step 120000/700000  loss 2.841  lr 7.1e-4  grad 0.420  img/s 41.2k  wait 1%  eta 3d04h"
    assert log_line(REPORT) == line
    assert "  loss inf  " in log_line(REPORT | {"loss": math.inf})


@pytest.mark.parametrize(
    "values",
    [
        {
            "step": 87_654,
            "steps": 1_000_000,
            "loss": 10.8412,
            "grad_norm": 12_345.6,
            "wait": 0.12,
            "eta_s": 13.2 * 86400,
        },
        {
            "step": 1_000_000,
            "steps": 1_000_000,
            "loss": 6.9077,
            "grad_norm": 0.0423,
            "images_per_s": 999_949,
            "eta_s": 0,
        },
        {"step": 50, "steps": 1100, "loss": 0.000123456, "grad_norm": 1.5e-5, "lr": 0.0, "images_per_s": 63.3},
    ],
)
def test_log_line_fits_100_columns(values):
    """Use reports of ViT-H over a million steps, and of photographs on a laptop."""
    assert len("[pretrain] " + log_line(REPORT | values)) <= 100


def test_memory_is_the_peak(monkeypatch):
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert memory_gb() == pytest.approx(int(status["VmHWM"].removesuffix("kB")) / 2**20, rel=0.02)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    assert memory_gb() == 3.0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA L4", None),
    ],
)
def test_peak_is_that_of_the_form_of_the_gpu(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak


def test_torn_last_line_is_skipped_and_the_newest_record_found_at_the_end(tmp_path: Path):
    telemetry = Telemetry(tmp_path, rank=0, attempt=3)
    for step in range(1, 5):
        telemetry.report("train", REPORT | {"step": step})
    telemetry.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    last = last_metrics(tmp_path)
    assert last is not None
    assert (last["step"], last["attempt"]) == (4, 3)
    assert last_metrics(tmp_path / "nothing") is None


def test_non_finite_numbers_are_null_in_the_file_and_nan_when_read(tmp_path: Path):
    # The format of earlier versions.
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 8, "loss": NaN, "losses": [Infinity]}\n')
    telemetry = Telemetry(tmp_path, rank=0, attempt=1)
    recent = [{"step": 6, "loss": math.inf, "grad_norm": math.nan}]
    telemetry.report("train", REPORT | {"loss": math.nan, "losses": [1.5, math.inf], "mfu": None})
    telemetry.report("spike", {"step": 7, "grad_norm": -math.inf, "recent": recent})
    telemetry.close()

    _, first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"loss": null' in first
    assert '"losses": [1.5, null]' in first
    assert '"grad_norm": null, "recent": [{"step": 6, "loss": null, "grad_norm": null}]' in second

    older, train = read_metrics(tmp_path)
    assert math.isnan(train["loss"])
    assert train["losses"][0] == 1.5
    assert math.isnan(train["losses"][1])
    assert train["mfu"] is None
    assert "loss nan" in log_line(train)
    assert math.isnan(older["loss"])
    assert older["losses"] == [math.inf]
    (spike,) = read_metrics(tmp_path, "spike")
    assert math.isnan(spike["grad_norm"])
    assert math.isnan(spike["recent"][0]["grad_norm"])


def test_log_line_shows_the_speed_of_all_steps_since_the_previous_line() -> None:
    """A save after 2 of 5 steps ended a record; the line must show 50 images in 10 s, not the last 30 in 4 s."""
    since_line = Window()
    before_save = Window()
    before_save.losses = [3.0, 2.9]
    before_save.norms = [0.5, 0.4]
    before_save.evaluated_s = 1.0
    after_save = Window()
    after_save.losses = [2.8, 2.7, 2.6]
    after_save.norms = [0.3, 0.3, 0.2]
    now = time.monotonic()
    before_save.since = now - 11
    after_save.since = now - 4
    since_line.extend(before_save)
    since_line.extend(after_save)
    values = since_line.values(samples=50, flops=0.0, peak=None, steps_left=5)
    assert values["images_per_s"] == pytest.approx(50 / 10, rel=0.01)
    assert values["losses"] == [3.0, 2.9, 2.8, 2.7, 2.6]
    assert values["grad_norm"] == 0.2
    assert values["eta_s"] == pytest.approx(10, rel=0.01)


def test_only_rank_0_writes_records_and_every_worker_may_log(tmp_path: Path):
    other = Telemetry(tmp_path, rank=2, attempt=1)
    other.report("train", REPORT)
    other.log("bad sample 1 replaced: a.tar 7: no JPEG")
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "log.txt").read_text() == "[worker 2] bad sample 1 replaced: a.tar 7: no JPEG\n"


def test_tensorboard_opens_on_the_loss(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    telemetry = Telemetry(tmp_path, rank=0, attempt=1)
    for kind in ("train", "checkpoint", "effective", "evaluate"):
        telemetry.report(kind, REPORT | {"took_s": 1.0, "accuracy": 0.9})
    telemetry.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curves = sorted(events.Tags()["scalars"])  # in the order of TensorBoard's page
    assert curves[0] == "1 train/1 loss"
    assert "2 evaluate/accuracy" in curves
    assert "checkpoint/took_s" in curves


def test_log_line_contains_no_terminal_control_sequences(tmp_path):
    Telemetry(tmp_path, 0, 1).log("bad sample a\x1b]0;title\x07: × 3\nthe second line\u202e")
    assert (tmp_path / "log.txt").read_text() == "bad sample a\\x1b]0;title\\x07: × 3\nthe second line\\u202e\n"


# ------------------------------------------------------------------------------------------------ damaged lines


def write_records(folder: Path) -> list[bytes]:
    """Write 6 records of two attempts; return the lines of metrics.jsonl without line breaks."""
    for attempt in (1, 2):
        telemetry = Telemetry(folder, rank=0, attempt=attempt)
        telemetry.report("start", {"step": 4 * (attempt - 1)})
        telemetry.report("train", REPORT | {"step": 4 * attempt, "losses": [0.566]})
        telemetry.report("evaluate", {"step": 4 * attempt, "accuracy": 0.566, "note": "J*Z"})
        telemetry.close()
    return (folder / "metrics.jsonl").read_bytes().splitlines()


def test_each_flipped_bit_is_reported_with_its_line(tmp_path: Path):
    lines = write_records(tmp_path)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    assert len(lines) == 6
    undetected = []
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        expected = content[: bit // 8].count(b"\n") + 1
        damaged = damaged_lines(bytes(flipped).splitlines(keepends=True))
        if expected not in damaged:
            undetected.append((bit, damaged))
    # A flipped line break at the end leaves every record intact.
    assert all(bit // 8 == len(content) - 1 for bit, _ in undetected), undetected[:3]


@pytest.mark.parametrize("zeroed_bytes", [1, 40, 400, 4096])
def test_zeroed_end_is_refused(tmp_path: Path, zeroed_bytes: int):
    write_records(tmp_path)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    zeroed = min(zeroed_bytes, len(content) - 1)
    path.write_bytes(content[:-zeroed] + bytes(zeroed))
    if zeroed_bytes == 1:  # only the line break: all records are intact, and the digest still ends the line
        with pytest.raises(DataError, match="line 6: a record continues after its digest"):
            read_metrics(tmp_path)
        return
    with pytest.raises(DataError, match=f"line .*contains {zeroed} zero bytes"):
        read_metrics(tmp_path)


def test_damage_is_refused_or_collected_and_the_printed_command_removes_it(tmp_path: Path):
    lines = write_records(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"accuracy": 0.566', b'"accuracy": 0.766', 1))
    with pytest.raises(
        DataError, match=r"metrics\.jsonl is damaged: line 3: its digest is .{8}, expected .{8}"
    ) as error:
        read_metrics(tmp_path)
    damage: list[str] = []
    records = read_metrics(tmp_path, None, damage)
    assert damage == [str(error.value)]
    assert [record["step"] for record in records] == [0, 4, 4, 8, 8]
    assert not any("crc" in record for record in records)

    command = str(error.value).rpartition("run: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert path.read_bytes().splitlines() == lines[:2] + lines[3:]
    assert len(read_metrics(tmp_path, None)) == 5


@pytest.mark.parametrize("line", ["{}", '{"kind": "train", "step": 9}', "[1]", '"text"'])
def test_a_damaged_line_is_skipped_also_if_it_is_valid_json(tmp_path: Path, line: str):
    lines = write_records(tmp_path)
    text = "\n".join([*map(bytes.decode, lines[:3]), line, *map(bytes.decode, lines[3:])])
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    damage: list[str] = []
    assert len(read_metrics(tmp_path, None, damage)) == len(lines)
    assert "line 4: its digest is missing" in damage[0]


@pytest.mark.parametrize("cut", [1, 2, 10, 11, 20, 30, 200])
def test_line_cut_off_by_a_killed_writer_is_skipped_before_and_after_the_next_attempt(tmp_path: Path, cut: int):
    lines = write_records(tmp_path)
    path = tmp_path / "metrics.jsonl"
    complete = b"\n".join(lines[:5]) + b"\n"
    path.write_bytes(complete + lines[4][: min(cut, len(lines[4]) - 1)])
    assert len(read_metrics(tmp_path, None)) == 5
    telemetry = Telemetry(tmp_path, rank=0, attempt=3)
    telemetry.report("start", {"step": 4})
    telemetry.close()
    assert [record["attempt"] for record in read_metrics(tmp_path, None)] == [1, 1, 1, 2, 2, 3]


def test_lines_lost_on_a_full_disk_are_not_damage(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = write_records(tmp_path)
    telemetry = Telemetry(tmp_path, rank=0, attempt=3)
    path.write_bytes(path.read_bytes() + lines[0][:37])  # the disk accepted the first bytes of two records
    telemetry.lost_lines["metrics.jsonl"] = 2
    telemetry.report("start", {"step": 8})
    telemetry.close()
    assert len(read_metrics(tmp_path, None)) == 7


def test_records_without_digests_are_read_only_before_the_first_digest(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tr\n')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]
    write_records(tmp_path)
    assert len(read_metrics(tmp_path, None)) == 7
    with open(path, "a") as file:
        file.write('{"kind": "train", "step": 9}\n')
    with pytest.raises(DataError, match="line 9: its digest is missing"):
        read_metrics(tmp_path)
