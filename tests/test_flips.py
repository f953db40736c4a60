"""What only interrupted commands leave behind, and logs: a flipped bit is found by name, or has no effect."""

import json
import os
import random
import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from data.errors import DataError
from data.shards.index import Index, load_index
from data.shards.packing import pack
from data.shards.reader import Reader
from data.shards.sources import Sample, digits
from jobs.__main__ import main
from jobs.session import write_status
from pipeline import health
from pipeline.monitoring.telemetry import Telemetry
from tests.test_telemetry import REPORT

SEED = int(os.environ.get("FAULT_SEED", "20261122"))


def stop_packing_in_the_middle(folder: Path) -> None:
    """Pack until the source ends with an error, as a packing does that is killed: finished shards are in a journal."""

    def ends_early() -> Iterator[Sample]:
        yield from islice(digits(True, image_size=16), 250)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(ends_early(), folder, name="train", shard_samples=50)
    assert (folder / "train.index.json.partial").exists()


# ------------------------------------------------------------------------ a flip


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """Flip a bit in place, size, inode and times as they were; afterwards the file is what it was before.

    A command may write the file anew meanwhile, as each does with status.json.
    """
    original = file.read_bytes()
    damaged = bytearray(original)
    damaged[bit // 8 % len(damaged)] ^= 1 << bit % 8
    overwrite(file, damaged)
    try:
        yield
    finally:
        overwrite(file, original)


def overwrite(file: Path, content: bytes) -> None:
    times = file.stat()
    with open(file, "r+b") as opened:
        opened.write(content)
        opened.truncate()
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def contents(index: Index) -> list[object]:
    """All that a run learns from a set: its samples' bytes, and what the index says of them."""
    reader = Reader(index)
    samples = [reader.read(shard, n) for shard, size in enumerate(index.shard_samples) for n in range(size)]
    return [samples, vars(index)]


def pack_to_the_end(stopped: Path, copy: Path) -> Index:
    """The set that a stopped packing comes to when the command is given again, in a copy."""
    shutil.copytree(stopped, copy)
    return pack(islice(digits(True, image_size=16), 300), copy, name="train", shard_samples=50)


def test_any_bit_of_the_left_out_steps_is_found_and_a_file_without_a_digest_is_read(tmp_path):
    health.write_left_out(tmp_path, [range(10, 17), range(30, 31)])
    file = tmp_path / health.LEFT_OUT
    assert health.left_out_of(file) == [[10, 17], [30, 31]]
    for bit in range(8 * file.stat().st_size):
        with flipped(file, bit), pytest.raises(DataError, match=r"left-out\.json has changed"):
            health.left_out_of(file)
    file.write_text("[[10, 17]]")
    assert health.left_out_of(file) == [[10, 17]]


def test_a_bit_of_the_journal_of_a_stopped_packing_makes_no_other_set(tmp_path):
    stop_packing_in_the_middle(tmp_path / "stopped")
    whole = contents(pack_to_the_end(tmp_path / "stopped", tmp_path / "whole"))
    journal = tmp_path / "stopped" / "train.index.json.partial"
    draw = random.Random(SEED)
    for number in range(30):
        with flipped(journal, draw.randrange(8 * journal.stat().st_size)):
            index = pack_to_the_end(tmp_path / "stopped", tmp_path / f"{number}")
        assert contents(index)[0] == whole[0] and index.digest == load_index(tmp_path / "whole").digest
        written = json.loads((tmp_path / f"{number}" / "train.index.json").read_text())
        assert written == json.loads((tmp_path / "whole" / "train.index.json").read_text())


def test_a_log_or_status_that_has_changed_is_named_and_never_taken_for_a_bug(tmp_path, capsys):
    stage = tmp_path / "run" / "pretrain-1a2b3c4d"
    telemetry = Telemetry(stage, rank=0, attempt=1)
    telemetry.report("start", {"step": 0, "world": 2, "claimed": 1.0, "drop": [], "text": "random weights"})
    telemetry.report("train", REPORT)
    telemetry.close()
    (stage / "stage.json").write_text("{}")
    write_status(tmp_path / "run", None, "running", "python -m jobs run digits")
    (tmp_path / "run" / "owner.json").write_text(json.dumps({"host": socket.gethostname(), "pid": 3_999_999}))
    look = ["status", str(tmp_path / "run")]
    assert main(look) == 0
    assert "killed, or lost with its machine" in capsys.readouterr().out
    draw = random.Random(SEED)
    codes: Counter[int] = Counter()
    for file in (stage / "metrics.jsonl", tmp_path / "run" / "status.json", tmp_path / "run" / "owner.json"):
        for _ in range(200):
            with flipped(file, draw.randrange(8 * len(file.read_bytes().rstrip()))):
                code = main(look)
            said = capsys.readouterr().err
            codes[code] += 1
            assert code == 0 or (code == 65 and f"{file} has changed" in said), (file, said)
    assert codes[65] > 5
