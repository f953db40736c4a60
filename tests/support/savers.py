"""Save and load checkpoints without a run: all ranks in one process with a fake engine, or real workers.

This is a separate module because workers import it by name.
"""

import ctypes
import json
import os
import random
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import models
from data import files
from data.errors import CheckpointError
from data.storage import open_storage
from pipeline.checkpoints import restore
from pipeline.checkpoints import saver as saving
from pipeline.checkpoints.manifest import Manifest, committed, digest, sealed
from pipeline.checkpoints.saver import Saver
from pipeline.checkpoints.stage_checkpoints import Chosen, StageCheckpoints, WrittenFile, checkpoints_in
from pipeline.engine.engine import Engine, Fragment, ReadState
from pipeline.engine.settings import deepspeed_config
from pipeline.optimization import OptimConfig
from pipeline.process_group import join_group
from pipeline.training_config import SavingConfig


def known(name: str, kind: str, start: int, count: int) -> torch.Tensor:
    """Return elements of a reproducible artificial state: 24 pseudorandom bits each, exact in fp32."""
    at = torch.arange(start, start + count, dtype=torch.int64) + zlib.crc32(f"{name} {kind}".encode())
    return (at * 2654435761 % 2**24).to(torch.float32) / 2**24


class FakeEngine:
    """A rank's half (or whole) of a parameter of 96 elements, with its moments."""

    def __init__(self, rank: int, world: int, step: int) -> None:
        self.part, self.rank, self.step = 96 // world, rank, step
        self.restored: dict[str, torch.Tensor] = {}

    def fragments(self) -> Iterator[Fragment]:
        start = self.rank * self.part
        yield Fragment("w", start, {k: known("w", k, start, self.part) + self.step for k in ("master", "exp_avg")})

    def load(self, read: ReadState, updates: int) -> None:
        for kind in ("master", "exp_avg"):
            self.restored[kind] = read("w", kind, self.rank * self.part, self.part)


ALONE = SimpleNamespace(
    get_rank=lambda: 0,
    get_world_size=lambda: 1,
    broadcast_object_list=lambda values, src: None,
    all_gather_object=lambda values, mine: values.__setitem__(0, mine),
    barrier=lambda: None,
)


def start_from(folder: Path, attempt: int, say: Callable[[str], None]) -> Chosen | None:
    """Return the checkpoint from which a single worker would resume, after reading it fully; None without one."""
    chosen = None
    real = restore.dist
    restore.dist = ALONE  # type: ignore[assignment]
    checkpoints = checkpoints_in(folder)
    try:
        chosen = restore.choose_together(checkpoints, attempt, say)
        if chosen is not None:
            engine = FakeEngine(0, 1, 0)
            chosen = restore.load_together(engine.load, checkpoints, chosen, attempt, say)
            for kind, state in engine.restored.items():
                assert torch.equal(state, known("w", kind, 0, 96) + chosen.manifest.step)
    finally:
        restore.dist = real
    return chosen


def pick(folder: Path, attempt: int = 2) -> tuple[int, list[str]]:
    """Return the step that a start would load, and its log lines."""
    lines: list[str] = []
    found = start_from(folder, attempt, lines.append)
    assert found is not None
    return found.manifest.step, lines


def reseal(step: Path, **changes: object) -> None:
    """Return a manifest that matches the folder's current content, as an attacker would write it."""
    files = {p.name: digest(memoryview(p.read_bytes())) for p in step.iterdir() if p.name != "MANIFEST.json"}
    manifest = replace(json_manifest(step), files=files, **changes)  # type: ignore[arg-type]
    (step / "MANIFEST.json").write_bytes(sealed(manifest))


def json_manifest(step: Path) -> Manifest:
    values = json.loads((step / "MANIFEST.json").read_text())
    del values["sha256"]
    return Manifest(**values)


def back(folder: Path, good: Path) -> None:
    """Restore the folder's previous content."""
    shutil.rmtree(folder)
    shutil.copytree(good, folder)


def damage(how: str, file: Path, rng: random.Random) -> str:
    """Damage one file of a checkpoint; return its name."""
    content = file.read_bytes()
    if how == "cut":
        file.write_bytes(content[: rng.randrange(1, len(content))])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "longer":
        file.write_bytes(content + b"\0" * rng.randrange(1, 9))
    elif how == "one too many":
        file = Path(shutil.copy(file, file.with_name(f"rank-{rng.randrange(2, 100):05d}.safetensors")))
    else:
        file.unlink()
        if how == "a folder":
            file.mkdir()
        elif how == "a pipe":
            os.mkfifo(file)
    return file.name


class Quiet:
    """Telemetry that discards everything."""

    def log(self, text: str) -> None:
        pass

    def report(self, kind: str, values: dict[str, Any], line: str = "") -> bool:
        return True

    def sync(self) -> None:
        pass

    def enter(self, phase: str, step: int) -> None:
        """Enter a phase; does nothing."""


def saver_of(checkpoints: StageCheckpoints, telemetry: Any = None, keep: int = 1000) -> Saver:
    """Return a Saver that logs nothing, prunes nothing and continues after any failure; arguments override this."""
    return Saver(
        checkpoints, telemetry or Quiet(), Quiet(), SavingConfig(keep=keep, keep_every=0, max_failed_saves=1000)
    )


class WorkerGroup:
    """Savers of all ranks in one process, called one after another; `dist` replaces torch.distributed."""

    def __init__(
        self,
        run: Path,
        attempt: int = 1,
        world: int = 2,
        telemetry: Any = None,
        keep: int = 1000,
        remote: str | None = None,
    ) -> None:
        self.run, self.attempt, self.world, self.rank = run, attempt, world, 0
        self.folder = run / "stage" / "checkpoints"
        self.checkpoints = StageCheckpoints(open_storage(run, remote), "stage")
        self.savers = [saver_of(self.checkpoints, telemetry, keep) for _ in range(world)]
        self.dist = SimpleNamespace(
            get_rank=lambda: self.rank,
            get_world_size=lambda: world,
            all_gather_object=self.gather,
            broadcast_object_list=self.tell,
        )
        self.listings: list[list[str]] = []  # the folder's content when the other workers received a decision

    def checkpoints_anew(self) -> StageCheckpoints:
        """Return the same checkpoints as a new start sees them."""
        return StageCheckpoints(self.checkpoints.storage, "stage")

    def temporary(self, step: int) -> Path:
        """Return the temporary folder of a save."""
        return self.run / self.checkpoints.staged_name(manifest(step, self.attempt, self.world))

    def tell(self, values: list[Any], src: int) -> None:
        self.listings.append(sorted(path.name for path in self.folder.iterdir()))

    def gather(self, results: list[WrittenFile], mine: WrittenFile) -> None:
        results[:] = [saver.result for saver in self.savers]

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Connect the savers' collectives to the ranks of this group in the block."""
        before = saving.dist
        saving.dist = self.dist  # type: ignore[attr-defined]
        try:
            yield
        finally:
            saving.dist = before  # type: ignore[attr-defined]

    def begin(self, step: int) -> None:
        with self.collectives():
            for rank, saver in enumerate(self.savers):
                self.rank, fake = rank, FakeEngine(rank, self.world, step)
                saver.begin(fake.fragments(), manifest(step, self.attempt, self.world))
                assert saver.thread is not None
                saver.thread.join()
        self.rank = 0

    def finish(self) -> Manifest | None:
        committed = self.finish_only()
        self.savers[0].wait_for_deleting()
        return committed

    def finish_only(self) -> Manifest | None:
        """Finish the save, but do not wait until old checkpoints are deleted; the training loop does the same."""
        for saver in self.savers[1:]:
            saver.thread = None
        with self.collectives():
            return self.savers[0].finish(self.savers[0].manifest.step)

    def save(self, step: int) -> Manifest | None:
        self.begin(step)
        return self.finish()


def with_steps(run: Path) -> "WorkerGroup":
    """Return a run with committed steps 10 and 20."""
    made = WorkerGroup(run)
    assert made.save(10)
    assert made.save(20)
    return made


def manifest(step: int, attempt: int, world: int, zero: int = 2) -> Manifest:
    return Manifest(
        step=step,
        samples_seen=step * 16,
        updates=step,
        ledger=f"{step:064x}",
        attempt=attempt,
        world=world,
        zero=zero,
        config={"seed": 0},
        key="k" * 64,
        code="c" * 64,
    )


# ------------------------------------------------------------------------ real engines


def engine(zero: int, width: int = 24, depth: int = 2) -> Engine:
    """Return a DeepSpeed engine with a small model."""
    config = models.config_of("mu/8", 16, 10, width=width, depth=depth, mlp=40, heads=2)
    model = models.from_config(config, torch.Generator().manual_seed(0))
    settings = deepspeed_config(zero=zero, precision="fp32", micro_batch=2, accumulation=1, clip=1.0, user_file=None)
    return Engine(model, models.decayed_parameters(model), OptimConfig(), settings)


def save_known(task: dict[str, Any]) -> None:
    """Save the known state at every ZeRO stage with this world size."""
    join_group(60)
    world = torch.distributed.get_world_size()
    for zero in task["zeros"]:
        folder = Path(task["run"]) / f"world-{world}-zero-{zero}"
        made = engine(zero, *task.get("size", ()))
        made.load(known, 7)
        saver = saver_of(checkpoints_in(folder))
        saver.begin(made.fragments(), manifest(7, 1, world, zero))
        assert saver.finish(7) is not None, saver.failure
        made.close()


def load_known(task: dict[str, Any]) -> dict[str, Any]:
    """Load every checkpoint at every ZeRO stage with this world size; return the tensors with differing bits."""
    join_group(60)
    wrong, elements, loads, outputs = [], set(), 0, set()
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    for zero in task["zeros"]:
        made = engine(zero)
        for folder in sorted(Path(task["run"]).glob("world-*")):
            for f in made.fragments():
                for view in f.tensors.values():
                    view.detach().fill_(torch.nan)
            checkpoints = checkpoints_in(folder)
            chosen = restore.choose_together(checkpoints, 2, print)
            assert chosen is not None
            assert restore.load_together(made.load, checkpoints, chosen, 2, print) == chosen, "none was refused"
            assert made.updates == chosen.manifest.updates == 7
            count = 0
            for f in made.fragments():
                for kind, view in f.tensors.items():
                    count += view.numel()
                    if not torch.equal(view, known(f.name, kind, f.start, view.numel())):
                        wrong.append(f"{folder.name} at ZeRO {zero}: {f.name} {kind}")
            total = torch.tensor(count)
            torch.distributed.all_reduce(total)
            elements.add(int(total))
            loads += 1
        with torch.no_grad():
            outputs.add(made.engine(images).double().sum().item())
        made.close()
    return {"wrong": wrong, "elements": sorted(elements), "loads": loads, "outputs": sorted(outputs)}


def load_damaged(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Save steps 10 and 20; for every case, damage step 20 and return what the group loads.

    A case is (ZeRO stage, file in which a bit is flipped); file "" stands for a node whose worker 1 reads wrong bytes
    although those on disk are correct.
    """
    join_group(60)
    rank = torch.distributed.get_rank()
    run = Path(task["run"])
    good = run / "good"
    made = engine(2)
    saver = saver_of(checkpoints_in(good))
    for step in (10, 20):
        made.restore(lambda name, kind, start, count, step=step: known(name, kind, start, count) + step)
        saver.begin(made.fragments(), manifest(step, 1, 2))
        assert saver.finish(step) is not None, saver.failure
    made.close()

    preadv = os.preadv
    outcomes = []
    for number, (zero, file) in enumerate(task["cases"]):
        folder = run / f"case-{number}"
        if rank == 0:
            shutil.copytree(good, folder)
            if file:
                damaged = committed(folder)[0] / file
                content = bytearray(damaged.read_bytes())
                content[-5] ^= 4
                damaged.write_bytes(content)
        torch.distributed.barrier()
        if rank == 1 and not file:
            os.preadv = read_wrong  # type: ignore[assignment]
        made = engine(zero)
        lines: list[str] = []
        outcome: dict[str, Any] = {"step": 0, "wrong": 0, "error": ""}
        try:
            checkpoints = checkpoints_in(folder)
            chosen = restore.choose_together(checkpoints, 2, lines.append)
            assert chosen is not None
            chosen = restore.load_together(made.load, checkpoints, chosen, 2, lines.append)
            outcome["step"] = chosen.manifest.step
            for f in made.fragments():
                for kind, view in f.tensors.items():
                    expected = known(f.name, kind, f.start, view.numel()) + chosen.manifest.step
                    outcome["wrong"] += int((view != expected).sum())
        except CheckpointError as error:
            outcome["error"] = str(error)
        os.preadv = preadv
        made.close()
        outcomes.append({**outcome, "log": lines, "left": sorted(path.name for path in folder.iterdir())})
    everybody: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybody, outcomes)
    return everybody


def read_wrong(handle: int, buffers: list[memoryview], offset: int) -> int:
    """Read like os.preadv and flip a bit, as faulty memory of a node does."""
    content = bytearray(os.pread(handle, len(buffers[0]), offset))
    content[0] ^= 1
    buffers[0][: len(content)] = content
    return len(content)


# ------------------------------------------------------------------------ storage not shared by the workers

CLONE_NEWNS = 0x20000  # man 2 unshare


def with_a_disk_of_its_own(folder: str) -> None:
    """Give this thread and its children a separate disk at `folder`, as on another node."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)


def save_apart(task: dict[str, Any]) -> str:
    """Save with worker 1 on a disk invisible to rank 0; return why the commit failed, or "" if it succeeded."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    run = Path(task["run"])
    files.SEEN_WITHIN_S = 0.5
    if rank == 1 and task["apart"]:
        with_a_disk_of_its_own(task["run"])
    saver = saver_of(checkpoints_in(run / "stage" / "checkpoints"))
    saver.begin(FakeEngine(rank, 2, 10).fragments(), manifest(10, 1, 2))
    saver.finish(10)
    return saver.failure
