"""Repeat the steps of a trained stage from one of its commits up to a later step; used by all replay commands.

1. audit, bisect and without create `Replays`: the stage to repeat (pipeline/extras/replays/batch.py) and an output
   folder. Nothing is written to the original run.
2. `Replays.cluster` determines the number of workers: any number in exact mode, otherwise the original number,
   because a different number changes the bits.
3. `Replays.repeat` links the commit into a separate run directory and runs the stage there like any other run, with
   agents, attempts and exit codes. The training loop ends at the requested step, and masks samples if requested.

In:  runs/digits/pretrain, steps 100 to 150, samples to mask, and the folder runs/digits-audit/steps-101-150
Out: in this folder, a run whose stage has the commit of step 150 and the records of its steps
"""

import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
from data.errors import UsageError
from jobs.cluster_config import ClusterConfig
from jobs.extras.replays.trained import find_trained
from jobs.kinds import load_extras
from jobs.resolved_recipe import Available, Campaign, CheckResult, Context, SharedClasses, Stage
from jobs.run.session import run_campaign
from jobs.stages import training
from jobs.terminal import echo
from pipeline import artifacts, config
from pipeline.extras.recorded_config import with_defaults
from pipeline.extras.replays.batch import TrainedStage
from pipeline.hooks import HookOptions
from pipeline.identity import code_version, git_commit
from pipeline.recipe import with_overrides
from pipeline.training_config import ProbeConfig, TrainConfig

NEVER = 1 << 62  # interval of saves for a replay that saves only its last step
# Watchers of a replay whose run the user keeps.
WATCHERS = ("jobs.extras.report.page_watcher:PageWatcher", "jobs.extras.monitor.gauges:Gauges")

Work = Callable[[TrainConfig, Context], Mapping[str, Any]]  # runs instead of a stage's training


# Extras that affect the computation of a step; replays ignore all others.
OF_STEPS = ("jobs.extras.studies.law:Branches", "jobs.extras.token_dropping:TokenDroppingExtra")


class AlwaysMasked(training.TrainingExtra):
    """Masks samples by giving them a loss weight of zero."""

    def __init__(self, masked: Sequence[Sequence[int]]) -> None:
        self.masked = masked

    def hooks(self, cfg: TrainConfig, context: Context) -> HookOptions:
        """Return the hook that masks these samples, in addition to those already masked in the first checkpoint."""
        return {"pipeline.extras.replays.spikes:Masking": {"masked": list(map(list, self.masked))}}


class Replay(training.Training):
    """The stage kind of a replay: repeats a trained stage's steps from a checkpoint, without its recipe."""

    def __init__(
        self, name: str, class_names: tuple[str, ...], last: int, masked: Sequence[Sequence[int]], work: Work | None
    ) -> None:
        """Configure a replay to train up to the step `last` without the `masked` samples, or to run `work` if given."""
        super().__init__([*load_extras(*OF_STEPS), AlwaysMasked(masked)])
        self.inputs = {}
        self.name = name  # kind of the original stage
        self.class_names = class_names
        self.last = last
        self.work = work

    def run(self, cfg: TrainConfig, context: Context) -> Mapping[str, Any]:  # type: ignore[override]
        """Train up to the last step, or run `work`."""
        context = replace(context, class_names=self.class_names)
        if self.work is not None:
            return self.work(cfg, context)
        return super().run(cfg, context, until=self.last)

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Return no results, because the original stage has already passed all checks."""
        return iter(())

    def shared_classes(self, cfg: TrainConfig) -> list[SharedClasses]:
        """Return no groups, because the class names come from the original run."""
        return []


class Replays:
    """Repeats steps of one stage for a replay command, in a folder next to the original run."""

    def __init__(self, command: str, run: str, output: str | None, overrides: Sequence[str]) -> None:
        """Find the stage named by `run`: RUN/STAGE, a stage's folder, or a run with a single trained stage.

        `overrides` set keys of the cluster config. Raises UsageError if there is no such stage, or if the output folder
        is inside the original run.
        """
        self.stage = TrainedStage(find_trained(run))
        self.record = artifacts.read_record(self.stage.folder / "stage.json")
        self.name = self.stage.folder.name
        self.overrides = overrides
        self.command = command
        self.log_lines: list[str] = []  # lines of the result, for the JSON report
        run_folder = self.stage.folder.parent
        default = run_folder.with_name(f"{run_folder.name}-{command}")
        self.folder = Path(output or default).resolve()
        if self.folder.is_relative_to(run_folder):
            raise UsageError(
                f"--output {self.folder} is inside the original run\n  use another folder, for example {default}"
            )

    def between(self, first: int | None, last: int | None) -> tuple[int, int]:
        """Return --from and --to. Raises UsageError unless both are steps of commits and --from is the earlier one."""
        commits = self.stage.bounds
        if first is None or last is None or first not in commits or last not in commits[1:]:
            listed = ", ".join(map(str, commits[-12:]))
            raise UsageError(
                f"--from is {first} and --to is {last}, expected the steps of two committed checkpoints of "
                f"{self.name}: {listed}"
            )
        if first >= last:
            raise UsageError(f"--from is {first} and --to is {last}, expected a later step for --to")
        return first, last

    def cluster(self, last: int) -> ClusterConfig:
        """Return the cluster config for repeating the steps up to `last`: the run's config with the overrides applied.

        Raises ConfigError if an override has an invalid value, or UsageError if it is not a cluster key or changes the
        number of workers although this would change the bits.
        """
        start = self.stage.start_of(last)
        world = start.get("world", 1)
        for override in self.overrides:
            if not override.startswith("cluster."):
                raise UsageError(
                    f"{override} is not a key of the section cluster\n  expected a key such as cluster.workers={world}"
                )
        defaults = {"backend": "processes", "workers": world, "cpus_per_worker": start.get("threads", 1)}
        values = with_overrides({"cluster": defaults}, self.overrides)["cluster"]
        cluster = config.build(ClusterConfig, values, "cluster")
        if not self.stage.cfg.exact_parts and (cluster.least, cluster.most) != (world, world):
            raise UsageError(
                f"step {last} of {self.name} was trained by {world} workers, but cluster.workers is {cluster.workers}; "
                "without exact_parts, a different number of workers gives different results\n"
                f"  set cluster.workers={world}"
            )
        return cluster

    def repeat(
        self,
        start: int,
        last: int,
        folder: Path,
        *,
        masked: Sequence[Sequence[int]] = (),
        evaluates: bool = False,
        resumes: bool = False,
        work: Work | None = None,
    ) -> TrainedStage:
        """Repeat the stage in `folder`, from its commit at step `start` (0: its initial weights) to step `last`.

        `masked` samples, given as ranges, get weight zero, like the samples masked by the run itself. With `evaluates`,
        the last step is evaluated as in the run. With `resumes`, the replay is a normal run, which shows its log, saves
        as often as the original, and resumes from the contents of the folder; otherwise, the folder is deleted first.
        `work` runs on the workers instead of training. Raises any error raised by a run.
        """
        stage = self.stage
        cfg = stage.config_at(start + 1, last)
        cfg = with_defaults(cfg, "evaluate_on evaluate_every keep_best patience law health")
        # Mask the samples masked by the run, from the same step on, and those of this replay from its start on.
        weightless = [*stage.masked(last), *masked]
        if not evaluates:
            cfg = replace(cfg, data=replace(cfg.data, evaluate=None), probe=ProbeConfig())
        if not resumes:
            cfg = replace(cfg, save_every=NEVER)
        cluster = self.cluster(last)
        if not resumes:
            shutil.rmtree(folder, ignore_errors=True)

        # 1. Link the commit, and the list of steps skipped by the run.
        target = folder / self.name
        stage.link_start(start, target)

        # 2. Build the stage with its original name and key, but without its recipe.
        kind = Replay(self.record["kind"], tuple(stage.job["class_names"]), last, weightless, work)
        name = self.record["name"]
        model = models.from_dict(self.record["model"])
        repeated = Stage(name=name, kind=kind, config=cfg, source=name, model=model, key=self.record["key"])
        run_campaign(Campaign(folder, cluster, (repeated,)), watchers=WATCHERS if resumes else (), quiet=not resumes)
        return TrainedStage(target)

    def log(self, line: str) -> None:
        """Print a line of results, and store it for the JSON report and the run's HTML report."""
        echo(line)
        self.log_lines.append(line.strip())

    def report(self, path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write the result with its provenance: the original run, date, machine and code version."""
        provenance = {
            "run": str(self.stage.folder.parent),
            "stage": self.record["name"],
            "key": self.record["key"],
            "code_of_run": self.stage.job["code"],
            "code": code_version(),
            "commit": git_commit(),
            "machine": socket.gethostname(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": self.command,
            "said": self.log_lines,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_record(path, {**provenance, **values})
        echo(f"written: {path}")
        return {"record": str(path), "content": {**provenance, **values}}
