"""The one primitive of replays: take the steps of a trained stage again, from one of its commits to a later step.

1. `Replays` is what audit, bisect and without begin with: the stage that they look at
   (pipeline/extras/replays/batch.py), and a folder of their own. Nothing is written into the run.
2. `Replays.cluster` says on what the steps are taken again: in exact mode any workers that fit, otherwise as many as
   took them the first time, because another number has other bits.
3. `Replays.take_again` links the commit into a run directory of its own, and runs the stage there as any run is run:
   agents, attempts, verdicts, exit codes. The loop is that of training, with another last step and perhaps a mask.

In:  runs/digits/pretrain, steps 100 to 150, samples to mask, and the folder runs/digits-audit/steps-101-150
Out: in that folder a run whose stage has the commit of step 150 and the records of its steps
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
from pipeline.extras.replays.batch import TrainedStage
from pipeline.hooks import HookOptions
from pipeline.identity import code_version, git_commit
from pipeline.recipe import with_overrides
from pipeline.training_config import ProbeConfig, TrainConfig

NEVER = 1 << 62  # steps between saves of a replay that keeps its last one alone
WATCHERS = ("jobs.extras.report.kept:KeptPage", "jobs.extras.monitor.gauges:Gauges")  # of a run that is kept

Work = Callable[[TrainConfig, Context], Mapping[str, Any]]  # what a stage does


# Extras that change what a step computes; the others have no part in a replay.
OF_STEPS = ("jobs.extras.studies.law:Branches", "jobs.extras.token_dropping:TokenDroppingExtra")


class AlwaysMasked(training.TrainingExtra):
    """Has samples without weight."""

    def __init__(self, masked: Sequence[Sequence[int]]) -> None:
        self.masked = masked

    def hooks(self, cfg: TrainConfig, context: Context) -> HookOptions:
        """Return the hook that masks them, and those of the checkpoint that the replay starts from."""
        return {"pipeline.extras.replays.spikes:Masking": {"masked": list(map(list, self.masked))}}


class Replay(training.Training):
    """A trained stage that runs again up to a step, from a checkpoint and without the recipe of its inputs."""

    def __init__(
        self, name: str, class_names: tuple[str, ...], last: int, masked: Sequence[Sequence[int]], work: Work | None
    ) -> None:
        """Set what a run of the stage does: train up to the step `last` without `masked` samples, or `work`."""
        super().__init__([*load_extras(*OF_STEPS), AlwaysMasked(masked)])
        self.inputs = {}
        self.name = name  # of the kind that the stage had
        self.class_names = class_names
        self.last = last
        self.work = work

    def run(self, cfg: TrainConfig, context: Context) -> Mapping[str, Any]:  # type: ignore[override]
        """Train up to the last step, or do the work that was given in place of training."""
        context = replace(context, class_names=self.class_names)
        if self.work is not None:
            return self.work(cfg, context)
        return super().run(cfg, context, until=self.last)

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Check nothing: the stage has run before."""
        return iter(())

    def shared_classes(self, cfg: TrainConfig) -> list[SharedClasses]:
        """Return nothing: the class names are those of the run."""
        return []


class Replays:
    """Takes steps of a stage again for one command: beside the run, and never in it."""

    def __init__(self, command: str, run: str, output: str | None, overrides: Sequence[str]) -> None:
        """Find the stage that `run` means: RUN/STAGE, its folder, or a run with one trained stage.

        `overrides` are keys of the cluster. Raises UsageError.
        """
        self.stage = TrainedStage(find_trained(run))
        self.record = artifacts.read_record(self.stage.folder / "stage.json")
        self.name = self.stage.folder.name
        self.overrides = overrides
        self.command = command
        self.said: list[str] = []  # what has come out, in lines
        run_folder = self.stage.folder.parent
        beside = run_folder.with_name(f"{run_folder.name}-{command}")
        self.folder = Path(output or beside).resolve()
        if self.folder.is_relative_to(run_folder):
            raise UsageError(
                f"--output {self.folder} lies in the run that is looked at\n  expected another, as {beside}"
            )

    def between(self, first: int | None, last: int | None) -> tuple[int, int]:
        """Return the commits that --from and --to name. Raises UsageError where they are none, or in another order."""
        commits = [0, *self.stage.commits]
        if first is None or last is None or first not in commits or last not in commits[1:]:
            listed = ", ".join(map(str, commits[-12:]))
            raise UsageError(f"--from {first} --to {last}: expected two commits of {self.name}: {listed}")
        if first >= last:
            raise UsageError(f"--from {first} --to {last}: expected a later step behind --to")
        return first, last

    def cluster(self, last: int) -> ClusterConfig:
        """Return what the steps up to `last` are taken again on: what is typed, and else what took them.

        Raises ConfigError, and UsageError where another number of workers would give other bits.
        """
        start = self.stage.start_of(last)
        world = start.get("world", 1)
        for override in self.overrides:
            if not override.startswith("cluster."):
                raise UsageError(f"{override} is no key of the cluster\n  expected for example cluster.workers={world}")
        defaults = {"backend": "processes", "workers": world, "cpus_per_worker": start.get("threads", 1)}
        values = with_overrides({"cluster": defaults}, self.overrides)["cluster"]
        cluster = config.build(ClusterConfig, values, "cluster")
        if not self.stage.cfg.exact_parts and (cluster.least, cluster.most) != (world, world):
            raise UsageError(
                f"step {last} of {self.name} was taken by {world} workers, and cluster.workers is {cluster.workers}: "
                f"without exact_parts other numbers have other bits\n  type cluster.workers={world}"
            )
        return cluster

    def take_again(
        self,
        start: int,
        last: int,
        folder: Path,
        *,
        masked: Sequence[Sequence[int]] = (),
        evaluates: bool = False,
        goes_on: bool = False,
        work: Work | None = None,
    ) -> TrainedStage:
        """Run the stage from its commit of step `start` (0: from its first weights) to step `last`, in a folder.

        `masked` samples, as ranges, weigh nothing, as do those that the run itself had masked. `evaluates` has the last
        step evaluated as the run was. `goes_on` makes it a run of its own: its lines are shown, it saves as often as
        the run, and it goes on with what the folder holds; else the folder begins anew. `work` is what its workers do
        in the place of training. Raises as a run does.
        """
        stage = self.stage
        cfg = stage.config_at(start + 1, last)
        cfg = config.with_defaults(cfg, "evaluate_on evaluate_every keep_best patience law health")
        # What the run did without, from where it did, and what this replay does without from its start.
        weightless = [*stage.masked(last), *masked]
        if not evaluates:
            cfg = replace(cfg, data=replace(cfg.data, evaluate=None), probe=ProbeConfig())
        if not goes_on:
            cfg = replace(cfg, save_every=NEVER)
        cluster = self.cluster(last)
        if not goes_on:
            shutil.rmtree(folder, ignore_errors=True)

        # 1. What the steps start from: the commit, and which steps the run had given up.
        target = folder / self.name
        stage.link_start(start, target)

        # 2. The stage as it was: of the same name and key, and without the recipe in which its inputs had names.
        kind = Replay(self.record["kind"], tuple(stage.job["class_names"]), last, weightless, work)
        name = self.record["name"]
        model = models.from_dict(self.record["model"])
        again = Stage(name=name, kind=kind, config=cfg, source=name, model=model, key=self.record["key"])
        run_campaign(Campaign(folder, cluster, (again,)), watchers=WATCHERS if goes_on else (), quiet=not goes_on)
        return TrainedStage(target)

    def say(self, line: str) -> None:
        """Print a line of what has come out, which the report keeps and the run's page shows."""
        echo(line)
        self.said.append(line.strip())

    def report(self, path: Path, values: Mapping[str, Any]) -> None:
        """Write what has come out, with the run that was looked at, and when, where and by which code it was."""
        made_by = {
            "run": str(self.stage.folder.parent),
            "stage": self.record["name"],
            "key": self.record["key"],
            "code_of_run": self.stage.job["code"],
            "code": code_version(),
            "commit": git_commit(),
            "machine": socket.gethostname(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": self.command,
            "said": self.said,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_record(path, {**made_by, **values})
        echo(f"written: {path}")
