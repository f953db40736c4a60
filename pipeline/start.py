"""What the training loop is made of: start, micro-batch, agreement, save, evaluation, report.

How training starts, first match wins:
1. a committed checkpoint of this stage: everything continues from its step, bit for bit at the same world;
2. `init`: weights of another stage, step 0, a fresh optimizer;
3. random weights from `seed`.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import models
from data.errors import CheckpointError, DataError
from data.evaluation import EvaluationBatch, EvaluationSet
from data.loader import Batch, TrainLoader
from data.order import Ledger
from data.shards.index import load_index
from pipeline import checkpoint, config
from pipeline.arithmetic import Arithmetic, batch_arithmetic, recomputed_blocks, steps_of
from pipeline.engine import Engine, deepspeed_config, join_group
from pipeline.evaluate import accuracy, features, normalise, probe, watched
from pipeline.exact import ExactEngine, say_price
from pipeline.health import Health
from pipeline.losses import LOSSES, dense_targets, mixup
from pipeline.saves import Saves
from pipeline.telemetry import Telemetry, Window, log_line, memory_gb, peak_flops
from pipeline.training_config import TrainConfig, cache_line, training_order
from pipeline.watchdog import Phases

DROPOUT = 1  # keeps dropout's draws apart from those of masked prediction


@dataclass(frozen=True)
class Job:
    """Where one attempt of a stage reads and writes; paths are absolute, workers live in other folders."""

    run: str  # the run directory, shared by all nodes
    directory: str  # of this stage
    attempt: int
    key: str  # of the stage
    code: str  # version of the code
    model: dict[str, Any]  # the resolved architecture (models.to_dict)
    train: list[str]  # the sets that are trained on, in the order of their names
    evaluate: str | None = None
    init: str | None = None
    probe_train: str | None = None
    probe_test: str | None = None
    claimed: float = 0.0  # when the driver began this attempt, seconds since 1970

    @property
    def attempt_folder(self) -> Path:
        """What this attempt's workers leave behind: their places, ends and logs."""
        return Path(self.directory) / "attempts" / f"attempt-{self.attempt:06d}"

    @property
    def stop_file(self) -> Path:
        """Appears when the driver wants the worker group to commit and end."""
        return self.attempt_folder / "stop"


class Trainer:
    """What the loop holds: the engine, the data and what has been seen so far."""

    def __init__(self, cfg: TrainConfig, job: Job) -> None:
        self.cfg, self.job = cfg, job
        self.phases = Phases(job.attempt_folder, int(os.environ["RANK"]), cfg.stall_s)
        self.phases.enter("join", 0)
        self.device = join_group(cfg.timeout_s)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.phases.enter("build", 0)
        self.directory = Path(job.directory)
        self.telemetry = Telemetry(self.directory, self.rank, job.attempt)
        paths = {path for path in (*job.train, job.evaluate, job.probe_train, job.probe_test) if path is not None}
        self.sets = {path: load_index(path) for path in paths}
        self.index, self.order = training_order(cfg, [self.sets[path] for path in job.train])
        self.steps = steps_of(cfg, sum(self.sets[path].samples for path in job.train))
        self.arithmetic = batch_arithmetic(cfg, self.world)
        self.model_config = models.from_dict(job.model)
        self.check_classes()
        self.engine = self._engine(self.arithmetic)
        self.window = Window()
        saver = checkpoint.Saver(self.directory / "checkpoints", Path(job.run), job.attempt)
        self.saves = Saves(cfg, saver, self.telemetry, self.window)
        self.health = Health(cfg, self.directory, saver.folder, self.telemetry)
        self.step = self.bad = 0
        self.ledger = Ledger.start(self.index.digest, cfg.seed)
        self.last_metrics: dict[str, float] = {}
        self.start()

    def check_classes(self) -> None:
        """Raise DataError where a set has labels that the head has no output for; training images are square."""
        height, width = self.model_config.image_size
        config.require(height == width, f"image_size is {height}×{width}: training crops are square")
        if self.cfg.objective == "masked":
            return
        for path in filter(None, (*self.job.train, self.job.evaluate)):
            found, classes = self.sets[path].classes, self.model_config.classes
            if found > classes:
                raise DataError(
                    f"{path} has labels up to {found - 1}, the model has {classes} classes\n  set model.classes={found}"
                )

    def _engine(self, arithmetic: Arithmetic) -> Engine:
        cfg = self.cfg
        model = models.from_config(self.model_config, torch.Generator().manual_seed(cfg.seed))
        if self.job.init:
            state, source = models.load_weights(self.job.init)
            state, report = models.transfer(state, source, self.model_config, new_head=cfg.new_head)
            model.load_state_dict(state, strict=False)  # transfer has accounted for every parameter
            counts = {kind: len(getattr(report, kind)) for kind in ("kept", "resized", "new", "dropped")}
            line = "parameters of init: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
            self.telemetry.report("transfer", {"step": 0, "report": str(report)}, line)
        model.recomputed_blocks = recomputed_blocks(cfg, self.model_config)
        if cfg.compile:
            models.compile_blocks(model)
        model.to(self.device)
        settings = deepspeed_config(
            zero=cfg.zero,
            precision=cfg.precision,
            micro_batch=cfg.micro_batch,
            accumulation=arithmetic.accumulation,
            clip=cfg.optim.clip,
            user_file=cfg.deepspeed,
        )
        self.phases.enter("engine", 0)
        made = partial(ExactEngine, parts=cfg.exact_parts) if cfg.exact_parts else Engine
        return made(model, models.decayed(model), cfg.optim, settings, cfg.polyak)

    # ------------------------------------------------------------------------------------------ how training starts

    def start(self) -> None:
        """Resume, or start from weights or seed; say which, and what is therefore ignored, in one line."""
        cfg, job = self.cfg, self.job
        with self.phases.led("restore", 0, self.rank == 0):
            found = checkpoint.restore(self.engine, self.saves.saver.folder, job.attempt, self.telemetry.say)
        if found is not None:
            if found.key != job.key:
                changed = "; ".join(config.differences(found.config, config.tagged(cfg, "forbid"))) or "its inputs"
                raise CheckpointError(
                    f"the newest checkpoint in {self.saves.saver.folder} is of stage key {found.key[:8]}, not "
                    f"{job.key[:8]}: {changed}\n  move it to where it came from"
                )
            self.step, self.bad, self.ledger = found.step, found.bad_samples, Ledger(found.ledger)
            ignored = f", init {job.init} ignored" if job.init else ", random weights ignored"
            text = (
                f"resumed from step {found.step} (attempt {found.attempt}, {found.world} workers, ZeRO {found.zero}, "
                f"ledger {found.ledger[:12]}){ignored}"
            )
        elif job.init:
            text = f"weights from {job.init}, optimizer fresh, step 0"
        else:
            text = f"random weights from seed {cfg.seed}, step 0"
        if self.rank == 0:
            a = self.arithmetic
            self.telemetry.say(
                f"attempt {job.attempt}: {text}; {self.world} workers × micro_batch {a.micro_batch} × accumulation "
                f"{a.accumulation} = batch {a.batch_size}, {self.steps} steps, ZeRO {cfg.zero} {cfg.precision}"
            )
            start = {
                "step": self.step,
                "text": text,
                "world": self.world,
                "claimed": job.claimed,
                "drop": cfg.data.drop,
            }
            self.telemetry.report("start", start)
        if self.index.remote and self.rank == 0:
            here = range(self.arithmetic.slots(int(os.environ["LOCAL_WORLD_SIZE"]) - 1).stop)
            self.telemetry.say(f"this node needs {cache_line(self.index, self.order, here, self.step, cfg.data)}")
        if isinstance(self.engine, ExactEngine):
            say_price(self.engine, cfg, self.telemetry, self.step)

    # ------------------------------------------------------------------------------------------ pieces of a step

    def micro_batches(self) -> Iterator[Batch]:
        """This worker's micro-batches from the current step on."""
        cfg = self.cfg
        return iter(
            TrainLoader(
                self.index,
                self.order,
                image_size=self.model_config.image_size[0],
                slots=self.arithmetic.slots(self.rank),
                micro_batch=cfg.micro_batch,
                accumulation=self.arithmetic.accumulation,
                start_step=self.step,
                seed=cfg.seed,
                augment=cfg.data.augment,
                max_labels=cfg.data.max_labels,
                processes=cfg.data.processes,
                timeout_s=cfg.data.timeout_s,
                cache=cfg.data.cache,
                decode=cfg.data.decode,
            )
        )

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Backward of one micro-batch, weighted so that the sum over workers and micro-batches is the global mean.

        Returns the summed loss of its samples.
        """
        cfg = self.cfg
        torch.manual_seed(self.draw_key(batch, DROPOUT))
        self.phases.enter("forward", self.step)
        images = normalise(batch.images, self.engine.dtype, self.device)
        total = self.masked_loss(images, batch) if cfg.objective == "masked" else self.labelled_loss(images, batch)
        self.phases.enter("backward", self.step)
        self.engine.backward(total * (self.world * self.arithmetic.accumulation / cfg.batch_size))
        return total.detach()

    def draw_key(self, batch: Batch, *purpose: int) -> int:
        """Seed of what is drawn for a micro-batch: of (seed, step, all its samples), and the purpose."""
        return config_seed(self.cfg.seed, self.step, *batch.ids.flatten().tolist(), *purpose)

    def labelled_loss(self, images: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Summed loss against the labels, smoothed and mixed as the recipe says."""
        cfg = self.cfg
        targets = dense_targets(batch.labels.to(self.device), self.model_config.classes, cfg.label_smoothing)
        if cfg.mixup:
            images, targets = mixup(images, targets, cfg.mixup, (cfg.seed, self.step))
        return LOSSES[cfg.loss](self.engine.forward(images), targets).sum()

    def masked_loss(self, images: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Summed loss of masked patch prediction; what is corrupted depends on the step and on the micro-batch's
        samples, so it is the same at every world that cuts the batch into the same micro-batches."""
        generator = torch.Generator(self.device).manual_seed(self.draw_key(batch))
        return models.masked.objective(self.engine.forward, images, generator)[0]

    def agree(self, loss: torch.Tensor, bad: int, stop: bool) -> tuple[float, int, bool, bool]:
        """Collective, once a step: (mean loss, bad samples, anyone wants to stop, everyone has written its file)."""
        status = torch.tensor([0.0, bad, stop, self.saves.saver.written], dtype=torch.float64, device=self.device)
        status[0] = loss
        dist.all_reduce(status)
        total, bad_sum, stops, written = status.tolist()
        mean = self.engine.loss if isinstance(self.engine, ExactEngine) else total / self.cfg.batch_size
        return mean, int(bad_sum), stops > 0, written == self.world

    def begin_save(self) -> None:
        """Snapshot now; a save still in flight is finished first."""
        self.phases.enter("save", self.step)
        self.saves.begin(
            self.engine,
            checkpoint.Manifest(
                step=self.step,
                samples_seen=self.step * self.cfg.batch_size,
                updates=self.engine.updates,
                ledger=self.ledger.hex,
                attempt=self.job.attempt,
                world=self.world,
                zero=self.cfg.zero,
                config=config.tagged(self.cfg, "forbid"),
                key=self.job.key,
                code=self.job.code,
                bad_samples=self.bad,
                metrics=self.last_metrics,
            ),
        )

    def finish_save(self) -> None:
        """Collective: commit the save in flight."""
        self.phases.enter("save", self.step)
        self.saves.finish()

    def evaluate(self, remark: str = "") -> None:
        """Collective: test accuracy and few-shot, as far as the recipe names sets for them."""
        cfg, job = self.cfg, self.job
        began = time.monotonic()
        values: dict[str, Any] = {}
        if job.evaluate:
            values["accuracy"], values["judged"] = accuracy(
                self.engine.model, self._samples(job.evaluate), self.engine.dtype, self.device
            )
            if (bad := self.sets[job.evaluate].samples - values["judged"]) and self.rank == 0:
                self.telemetry.say(
                    f"evaluate: {bad} bad samples of {job.evaluate} count neither way; see `jobs data check`"
                )
        if job.probe_train and job.probe_test:
            sets = [
                features(self.engine.model, self._samples(path), self.engine.dtype, self.device)
                for path in (job.probe_train, job.probe_test)
            ]
            with self.phases.led("probe", self.step, self.rank == 0):
                values |= probe(sets[0], sets[1], cfg.probe) if self.rank == 0 else {}
        if values and self.rank == 0:
            self.last_metrics = {k: v for k, v in values.items() if isinstance(v, float)}
            shown = "  ".join(f"{k} {v:.4f}" for k, v in self.last_metrics.items() if "seed" not in k)
            line = f"evaluate step {self.step}  {shown}{remark}"
            self.telemetry.report("evaluate", {"step": self.step, **values}, line)
        self.window.evaluated_s += time.monotonic() - began

    def _samples(self, path: str) -> Iterator[EvaluationBatch]:
        ops = self.cfg.data.preprocess or f"resize({self.model_config.image_size})"
        samples = EvaluationSet(
            self.sets[path],
            ops,
            batch_size=self.cfg.micro_batch,
            rank=self.rank,
            world=self.world,
            max_labels=self.cfg.data.max_labels,
            cache=self.cfg.data.cache,
        )
        return watched(samples, self.phases, self.step)

    def report(self, rate: float) -> None:
        """The log line and its record, of the steps since the one before."""
        samples = self.cfg.batch_size * len(self.window.losses)
        flops = models.training_flops(self.model_config, 1) * samples / self.world
        values = {
            "step": self.step,
            "steps": self.steps,
            "lr": rate,
            **self.window.values(samples, flops, peak_flops(self.device), self.steps - self.step),
            "memory_gb": memory_gb(),
            "world": self.world,
            "samples_seen": self.step * self.cfg.batch_size,
            "bad_samples": self.bad,
            "ledger": self.ledger.hex,
        }
        self.telemetry.report("train", values, log_line(values))
        self.window.clear()


def config_seed(*parts: int) -> int:
    """A seed for dropout that depends on what is computed, not on who computes it or what ran before."""
    return int(config.digest(parts)[:15], 16)
