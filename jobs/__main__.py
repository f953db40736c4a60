"""Patchline's command line: python -m jobs run|plan|status|demo|… (python -m jobs -h lists them all).

Exit codes: 0 done · 64 usage · 65 data · 69 cluster or storage unavailable · 70 diverged or internal ·
73 run owned by another · 74 I/O · 75 stopped after committing, run me again · 78 configuration.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[1])
if sys.path[0] != ROOT:  # first, also when started as `python -m jobs.pretrain` from elsewhere
    sys.path.insert(0, ROOT)

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, and turn whatever ends the command into one message and an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (function, text, add) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        add(command)
        command.add_argument("--debug", action="store_true", help="print the traceback of an error")
        command.set_defaults(function=function)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:
        return 64 if end.code else 0
    return guarded(options.function, options)


def guarded(function: Callable[[Any], int | None], options: argparse.Namespace) -> int:
    """Run a command; an error becomes its message on stderr and its exit code."""
    try:
        return function(options) or 0
    except KeyboardInterrupt:
        twice = "interrupted twice: ended without a commit; the last checkpoint stands"
        print(twice if hasattr(options, "recipe") else "interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 74
    except Exception as error:
        from data.errors import exit_code

        if options.debug:
            traceback.print_exc()
        code = exit_code(error)
        known = code != 70 or hasattr(error, "exit_code")
        text = (
            str(error)
            if known
            else f"{type(error).__name__}: {error}\n  a bug, or a case nobody thought of; --debug shows where"
        )
        print(text if code == 75 else f"error: {text}", file=sys.stderr)
        return code


def run_one(kind: str) -> None:
    """`python -m jobs.<kind> recipe.yaml`: the one stage of that kind, its inputs must be there."""
    parser = argparse.ArgumentParser(prog=f"python -m jobs.{kind}")
    add_recipe(parser)
    parser.add_argument("--stage", default=None, help="its name, where the recipe has several of this kind")
    parser.add_argument("--debug", action="store_true")
    try:
        options = parser.parse_args()
    except SystemExit as end:
        sys.exit(64 if end.code else 0)
    options.kind = kind
    sys.exit(guarded(run_command, options))


# ------------------------------------------------------------------------------------------------ commands


def run_command(options: argparse.Namespace) -> int:
    from jobs import campaign
    from jobs.session import run_campaign

    loaded = campaign.load(Path(options.recipe), options.overrides)
    only = stage_of_kind(loaded, options) if getattr(options, "kind", None) else None
    run_campaign(loaded, fresh=options.fresh, only=only)
    return 0


def stage_of_kind(loaded: Any, options: argparse.Namespace) -> str:
    from pipeline.config import require

    names = [stage.name for stage in loaded.stages if stage.kind == options.kind]
    if options.stage is not None:
        return loaded.stage(options.stage).name
    require(
        len(names) == 1,
        f"the recipe has {len(names)} stages of kind {options.kind}: {', '.join(names)}; --stage names one",
    )
    return names[0]


def plan_command(options: argparse.Namespace) -> None:
    from jobs import campaign
    from jobs.commands.plan import plan

    loaded = campaign.load(Path(options.recipe), options.overrides)
    print(campaign.resolved(loaded) if options.resolved else "\n".join(plan(loaded)))


def status_command(options: argparse.Namespace) -> None:
    from jobs.commands.status import status

    print("\n".join(status(Path(options.run).resolve())))


def checkpoints_command(options: argparse.Namespace) -> None:
    from jobs.commands.checkpoints import command

    command(options)


def replay_command(options: argparse.Namespace) -> None:
    from jobs.commands.replay import replay

    print("\n".join(replay(Path(options.run).resolve(), options.step, options.to)))


def add_replay(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("step", help="step=N, as the log counts them")
    parser.add_argument("--to", metavar="FILE.npz", help="write images, labels and ids there")


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "verify", "inspect", "diff", "export", "prune"))
    parser.add_argument("run", help="run directory, a stage's folder in it, or one step-* folder")
    parser.add_argument("--step", type=int, help="of this step; otherwise the newest, or all")
    parser.add_argument("--with", dest="other", metavar="RUN", help="diff: the run or checkpoint to compare with")
    parser.add_argument("--with-step", dest="other_step", type=int, help="diff: its step")
    parser.add_argument("--to", metavar="FOLDER", help="export: where to write weights.safetensors and model.json")
    parser.add_argument("--keep", type=int, default=2, help="prune: the newest that stay, 2 at least (default 2)")
    parser.add_argument("--keep-every", type=int, default=0, help="prune: steps whose multiples stay")


def demo_command(options: argparse.Namespace) -> int:
    from jobs.commands.demo import demo

    return demo(Path(options.directory))


def submit_command(options: argparse.Namespace) -> None:
    from data.errors import UsageError
    from jobs import campaign
    from jobs.cluster import submission

    run = campaign.load(Path(options.recipe), options.overrides).run  # a wrong recipe stops here, not on the cluster
    fresh = ["--fresh"] if options.fresh else []
    recipe = os.path.relpath(Path(options.recipe).resolve(), ROOT)
    if recipe.startswith(".."):
        raise UsageError(
            f"{options.recipe} lies outside {ROOT}, all that a job takes along\n  copy it into jobs/recipes"
        )
    named = [o for o in options.overrides if not o.startswith("run=")]
    command = ["python", "-m", "jobs", "run", recipe, *named, f"run={run}", *fresh]
    submission.submit(str(run), command)


def logs_command(options: argparse.Namespace) -> int:
    from jobs.cluster import submission

    job = submission.logs(job_name(options.run))
    return 0 if job.status in ("SUCCEEDED", "RUNNING", "PENDING") else job.exit_code or 70


def stop_command(options: argparse.Namespace) -> None:
    from jobs.cluster import submission

    submission.stop(job_name(options.run))


def list_command(options: argparse.Namespace) -> None:
    import time

    from jobs.cluster import submission

    for job in submission.list_jobs():
        print(
            f"{job.status:10} {time.strftime('%Y-%m-%d %H:%M', time.localtime(job.started_s))}  {job.run}  ({job.id})"
        )


def job_name(run: str) -> str:
    """A run is named by its directory; "runs/digits" and its absolute path are the same run, a job id stays one."""
    return str(Path(run).resolve()) if "/" in run or Path(run).exists() else run


def import_command(options: argparse.Namespace) -> None:
    from jobs.commands.weights import import_weights

    print("\n".join(import_weights(options.path, options.directory, options.overrides)))


def export_command(options: argparse.Namespace) -> None:
    from jobs.commands.weights import export_weights

    print("\n".join(export_weights(options.directory, options.path, options.format)))


def analyze_command(options: argparse.Namespace) -> None:
    from jobs.commands.analyze import analyze

    print("\n".join(analyze(options.weights, options.images, options.output, options.limit)))


def add_analyze(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", help="a folder of weights, or a file that `import` takes")
    parser.add_argument("images", nargs="+", help="image files, folders of them, or tar shards")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the pictures and numbers go")
    parser.add_argument("--limit", type=int, default=128, help="at most so many images (default: 128, as the paper)")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file; jobs/recipes holds those that ship")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example pretrain.optim.lr=1e-3")
    parser.add_argument("--fresh", action="store_true", help="start a half-done stage over where its config changed")


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--resolved", action="store_true", help="print the recipe with every default written out")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory, as the recipe's run: says")


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="an official .npz; a folder or .safetensors file of ours, timm or transformers")
    parser.add_argument("directory", help="where weights.safetensors and model.json go: what a recipe's init: names")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what the file cannot tell, as heads=3")


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="our weights: a stage's folder, or what `import` wrote")
    parser.add_argument("path", help="the file (npz) or folder to write")
    parser.add_argument("--format", choices=("safetensors", "npz", "timm", "hf"), required=True)


def later(name: str) -> Callable[[Any], Any]:
    """A function of jobs.commands.data, imported when it is called."""
    return lambda argument: getattr(import_module("jobs.commands.data"), name)(argument)


COMMANDS: dict[str, tuple[Callable[[Any], int | None], str, Callable[[argparse.ArgumentParser], Any]]] = {
    "run": (run_command, "run a campaign, or go on with it: the same command resumes", add_recipe),
    "plan": (plan_command, "print the campaign, batch arithmetic, parameters and FLOPs", add_plan),
    "status": (status_command, "stage, step, loss, speed, ETA and last checkpoint of a run", add_run),
    "checkpoints": (
        checkpoints_command,
        "list, verify, inspect, diff, export or prune what a run has saved",
        add_checkpoints,
    ),
    "replay": (replay_command, "rebuild the global batch of one step, as every worker saw it", add_replay),
    "demo": (
        demo_command,
        "the whole campaign on handwritten digits, with a worker killed on the way",
        lambda p: p.add_argument("--directory", default="runs"),
    ),
    "submit": (submit_command, "run a campaign as a Ray job on the cluster at RAY_ADDRESS", add_recipe),
    "logs": (logs_command, "follow what a submitted run prints", add_run),
    "stop": (stop_command, "ask a submitted run to commit and end", add_run),
    "list": (list_command, "the jobs on the cluster", lambda p: None),
    "import": (import_command, "official, timm or transformers weights into a folder of ours", add_import),
    "export": (export_command, "weights of a stage into an official, timm or transformers format", add_export),
    "analyze": (analyze_command, "pictures of what a ViT looks at: the paper's figures 6, 7 and 11", add_analyze),
    "pack": (later("pack_command"), "images of many kinds into shards with their index", later("add_pack")),
    "index": (later("index_command"), "index existing WebDataset tars", later("add_index")),
    "data": (later("data_command"), "check, stats or repair of a set of shards", later("add_data")),
}

if __name__ == "__main__":
    sys.exit(main())
