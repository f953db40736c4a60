"""Patchline's command line: `patchline COMMAND`, or `python -m jobs COMMAND`; `--help` lists the commands.

    patchline run digits pretrain.optim.lr=1e-3 --fresh
    patchline checkpoints verify runs/digits --step 50

1. This checkout comes first on the import path, so that no other package called `data` or `models` is taken for ours.
2. COMMANDS names every command's function as text. The module of the command that is typed is imported, and typer
   calls its function with the arguments (jobs/commands/lazy_group.py).
3. That function imports what it needs only now, so that `--help` answers at once.
4. Whatever ends the command becomes one message on stderr and an exit code, from the table in data/errors.py.

This is the only file that knows both the core and the extras.
"""

import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

# Before the imports below, which might find another package called `data` or `models` (step 1).
sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    import typer
except ModuleNotFoundError as error:
    print(f"error: this Python, {sys.executable}, has no {error.name}", file=sys.stderr)
    print("  type make env && source .venv/bin/activate", file=sys.stderr)
    sys.exit(69)  # something that is needed is not there: ExitCode.UNAVAILABLE
from typer.exceptions import TyperException
from typer.main import get_install_completion_arguments

from data.checks import printable_lines
from data.errors import ExitCode, UsageError, exit_code
from jobs.commands.lazy_group import CommandTable, LazyGroup
from jobs.terminal import activity, is_closed_pipe, program, write_last

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

EXIT_CODES = (
    "Exit codes: 0 done · 64 usage · 65 data · 69 cluster or storage unavailable · 70 diverged or internal · "
    "73 run owned by another · 74 I/O, or a bad checkpoint · 75 stopped after committing, run me again · "
    "78 configuration · 130 interrupted (a run: twice)"
)

STREAMS = {"logs", "run"}  # commands that print what others write, and show their own progress
SIGPIPE_CODE = 128 + signal.SIGPIPE  # as a shell has it of programs that end at a closed pipe
# Our commands, and what people who come from other programs call them.
OTHER_COMMANDS = {
    "run": "train fit start launch resume pretrain finetune",
    "evaluate": "eval test validate predict",
    "import": "convert load",
    "plan": "dry-run validate-recipe config",
}
# What is typed behind commands that take more than a recipe, or the path of a run.
EXAMPLES = {
    "analyze": "runs/photos/pretrain photos/cat --output pictures",
    "audit": "runs/photos/pretrain",
    "bisect": "runs/photos/pretrain step=120",
    "evaluate": "runs/photos/pretrain runs/photos/parts/held-out",
    "export": "runs/photos/pretrain exported --format timm",
    "import": "vit_b16.npz weights/b16",
    "index": "shards/theirs",
    "leaks": "shards/train --test shards/test --output leaks",
    "new": "photos",
    "pack": "folder photos/train shards/train",
    "replay": "runs/photos/pretrain step=120",
    "report": "runs/photos",
    "subset": "shards/photos --part :90% --seed 0 --output shards/photos-train",
    "without": "runs/photos/pretrain --samples bad.txt",
}

# Extras of the kinds that train (jobs/stages/training.py).
TRAINING_EXTRAS = (
    "jobs.extras.studies.law:Branches",
    "jobs.extras.token_dropping:TokenDroppingExtra",
    "jobs.extras.async_evaluation.extra:AsyncEvaluationExtra",
    "jobs.extras.best:Best",
    "jobs.extras.planning.memory_check:MemoryCheck",
)
# The kinds of stages, by their names in a recipe. Kinds and extras may be missing from a checkout.
KINDS = {
    "pack": "jobs.stages.pack:Pack",
    "pretrain": " ".join(["jobs.stages.training:Pretrain", *TRAINING_EXTRAS]),
    "resize": "jobs.stages.resize:Resize",
    "finetune": " ".join(["jobs.stages.training:Finetune", *TRAINING_EXTRAS]),
    "fewshot": "jobs.stages.fewshot:FewShot",
    "evaluate": "jobs.stages.evaluate:Evaluate",
    "sweep": "jobs.extras.studies.table:Table",
    "figure": "jobs.extras.studies.figure:Figure",
}

# What shows a run elsewhere than on the terminal (jobs/run/watchers.py).
WATCHERS = (
    "jobs.extras.report.page_watcher:PageWatcher",
    "jobs.extras.monitor.gauges:Gauges",
    "jobs.extras.monitor.trackers:Trackers",
)

COMMANDS = CommandTable(
    {
        "Runs": {
            "run": ("jobs.commands.campaigns:run", "Run a campaign, or resume it."),
            "status": ("jobs.commands.status:status", "Show stage, step, loss, speed, ETA and last checkpoint."),
            "checkpoints list": ("jobs.commands.checkpoints:list_all", "List the checkpoints of every stage."),
            "checkpoints verify": ("jobs.extras.checkpoints:verify_all", "Compare every byte with the manifest."),
            "checkpoints inspect": ("jobs.extras.checkpoints:inspect", "Print the manifest and all parameters."),
            "checkpoints diff": ("jobs.extras.checkpoints:compare", "Compare two checkpoints."),
            "checkpoints export": ("jobs.extras.checkpoints:export_weights", "Write a checkpoint's weights."),
            "checkpoints prune": ("jobs.commands.checkpoints:prune", "Delete all but the newest checkpoints."),
            "submit": ("jobs.commands.cluster:submit", "Run a campaign as a Ray job on a cluster."),
            "logs": ("jobs.commands.cluster:logs", "Follow the output of a submitted run."),
            "stop": ("jobs.commands.cluster:stop", "Ask a run to commit and end, wherever its driver is."),
            "list": ("jobs.commands.cluster:list_jobs", "List the jobs of the cluster."),
        },
        "Before a run": {
            "new": ("jobs.extras.new.command:new", "Write a recipe for a folder of images."),
            "plan": ("jobs.extras.planning.command:plan", "Print the stages, memory, time and cost of a recipe."),
            "trial": ("jobs.extras.planning.command:trial", "Measure 30 real steps of each trained stage."),
            "preflight": ("jobs.extras.planning.command:preflight", "Check workers, links, disks and data."),
        },
        "Data": {
            "pack": ("jobs.commands.sets:pack", "Pack images of many kinds into shards with an index."),
            "index": ("jobs.commands.sets:index", "Index existing WebDataset tars, unchanged."),
            "subset": ("jobs.extras.subset:subset", "Choose samples of a set; nothing is packed again."),
            "data check": ("jobs.extras.doctor.command:check", "Read and decode every sample."),
            "data stats": ("jobs.extras.doctor.command:stats", "Show how sizes and labels are distributed."),
            "data repair": ("jobs.extras.doctor.command:repair", "Pack every good sample into a new set."),
            "leaks": ("jobs.extras.leaks.command:leaks", "Find training images that are also in a test set."),
        },
        "Weights": {
            "import": ("jobs.commands.conversion:import_foreign", "Convert official, timm or transformers weights."),
            "export": ("jobs.commands.conversion:export", "Write weights for timm, transformers or big_vision."),
            "evaluate": ("jobs.commands.evaluate:evaluate", "Evaluate weights on sets, without a recipe."),
            "analyze": ("jobs.extras.analyze.command:analyze", "Draw attention maps, distances and filters."),
        },
        "After a run": {
            "report": ("jobs.extras.report.command:report", "Write the page of a run, or compare several."),
            "diff": ("jobs.extras.diff.command:diff", "Show how a recipe or run differs from another."),
            "replay": ("jobs.extras.replays.command:replay", "Rebuild the global batch of one step."),
            "audit": ("jobs.extras.replays.command:audit", "Prove a training by repeating parts of it bit for bit."),
            "bisect": ("jobs.extras.replays.command:bisect", "Find the samples that caused a spike."),
            "without": ("jobs.extras.replays.command:without", "Repeat a run as if samples had never been seen."),
        },
    },
    kinds=KINDS,
    watchers=WATCHERS,
    groups={
        "checkpoints": "List, verify, inspect, compare, export or prune checkpoints.",
        "data": "Check, measure or repair a set of shards.",
    },
)


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code. Errors become a message on stderr."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = LazyGroup(COMMANDS, "patchline", help="Large-scale pretraining of Vision Transformers.", epilog=EXIT_CODES)
    parser.params += get_install_completion_arguments()
    if "_PATCHLINE_COMPLETE" in os.environ:
        # A shell asks how a word may go on; this answers and ends the process.
        parser.main(prog_name="patchline")
    try:
        with parser.make_context(program(), list(words), obj=COMMANDS) as context:
            if not STREAMS.intersection(words[:1]):
                activity.now(f"{' '.join(words[:1])}: starting …")
            return parser.invoke(context) or ExitCode.DONE
    except typer.Exit as end:  # after --help
        return end.exit_code
    except TyperException as error:
        return report_usage(error, words)
    except KeyboardInterrupt as interrupt:
        # The first Ctrl-C asks a campaign to commit and end; a second one arrives here with words
        # (jobs/run/session.py).
        write_last(str(interrupt) or "interrupted")
        return ExitCode.INTERRUPTED
    except ImportError as error:
        activity.end()
        return report(missing_extra(error), with_traceback="--debug" in words)
    except Exception as error:
        # With the reader of our output, as in `patchline plan … | head`, goes whoever could see a message.
        if isinstance(error, BrokenPipeError) and is_closed_pipe(sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return SIGPIPE_CODE
        activity.end()
        return report(error, with_traceback="--debug" in words)
    finally:
        activity.end()


def report_usage(error: TyperException, words: Sequence[str]) -> int:
    """Print what is wrong with the words, below the usage of the command that they name; returns the exit code."""
    context = getattr(error, "ctx", None)
    if context is not None:
        print(context.get_usage(), file=sys.stderr)
    # pydantic, which typer reads values with, says whose error it was; choices come on a line each.
    message = " ".join(error.format_message().replace("Value error, ", "").split())
    for meant, others in OTHER_COMMANDS.items():
        if words and words[0] in others.split():
            # In the place of what is spelt alike.
            message = message.partition(" Did you mean")[0]
            message += f"\n  {words[0]} is called {meant} here: {program()} {meant} --help"
    if words and words[0].endswith(".yaml"):
        message += f"\n  to run a recipe type {program()} run {shlex.quote(words[0])}"
    print(f"error: {message}", file=sys.stderr)
    option = getattr(error, "option_name", None)
    if option and words[0] in ("run", "plan", "submit", "trial", "preflight"):
        print("  keys of the recipe are typed without dashes: pretrain.optim.lr=1e-3", file=sys.stderr)
        if option in ("--minutes", "--model", "--init", "--unlabelled"):
            print(f"  {option} is an option of new, which writes the recipe", file=sys.stderr)
    parameter = getattr(error, "param", None)
    if words and words[0] in EXAMPLES and (parameter is not None or context is None):
        print(f"  for example: {program()} {words[0]} {EXAMPLES[words[0]]}", file=sys.stderr)
    if parameter is not None and parameter.name == "recipe":
        from jobs.commands.campaigns import shipped

        names = ", ".join(name for name in shipped() if "/" not in name)
        print(f"  expected a YAML file, or a recipe that ships: {names}", file=sys.stderr)
    if context is not None:
        print(f"  {context.command_path} --help tells more", file=sys.stderr)
    return ExitCode.USAGE


def missing_extra(error: ImportError) -> Exception:
    """Return the error to report if an import fails: for a deleted extra, which one the command cannot do without."""
    module = error.name or ""
    # `from pipeline.extras import best` names the folder, and the module only in its message.
    missing = re.match(r"cannot import name '(\w+)'", error.msg or "")
    if module.endswith(".extras") and missing is not None:
        module += f".{missing[1]}"
    elif ".extras" not in module or not isinstance(error, ModuleNotFoundError):
        return error
    return UsageError(
        f"this installation has no {module.replace('.', '/')}\n  the command needs it; other commands work without it"
    )


def report(error: Exception, *, with_traceback: bool) -> int:
    """Print an error's message, and that it is a bug where Patchline raises no such error; returns the exit code."""
    if with_traceback:
        traceback.print_exc()
    code = exit_code(error)
    text = str(error)
    if isinstance(error, OSError):
        from data.files import explain  # it imports OpenSSL, for which --help does not wait

        text = explain(error)
    # Some of our own errors mean 70 (diverged), and carry it as `exit_code`; only what carries none is a bug.
    if code == ExitCode.INTERNAL and not hasattr(error, "exit_code"):
        text = f"{type(error).__name__}: {error}\n  a bug, or a case nobody thought of; --debug shows where"
    # To have stopped after a commit is no error: the message says what to type next.
    if code != ExitCode.PREEMPTED:
        text = f"error: {text}"
    # A terminal that is stuck must not keep a stopped run from ending.
    write_last(printable_lines(text))
    return code


if __name__ == "__main__":
    sys.exit(main())
