"""Patchline's command line: `patchline COMMAND`, or `python -m jobs COMMAND`; `--help` lists the commands.

    patchline run digits pretrain.optim.lr=1e-3 --fresh
    patchline checkpoints verify runs/digits/pretrain/step-50

1. Put this checkout first on the import path, so that Python does not import another package named `data` or `models`.
2. Look up the command in COMMANDS, which maps each command to "module:function". Import only that module, and let
   typer call the function with the arguments (jobs/commands/lazy_group.py).
3. The function imports torch, Ray and other slow packages only when it is called, to keep `--help` fast.
4. Print the lines of the command's answer (jobs/answer.py) or, with --json, its document (jobs/extras/json_output.py).
5. Turn any exception into one message on stderr and an exit code from the table in data/errors.py.

This is the only file that imports from both the core and the extras.
"""

import atexit
import io
import os
import re
import select
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn, TextIO

# Step 1; must precede the imports below, which could otherwise find another package named `data` or `models`.
sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    import typer
except ModuleNotFoundError as error:
    print(f"error: {error.name} is not installed in this Python ({sys.executable})", file=sys.stderr)
    print("  run make env && source .venv/bin/activate", file=sys.stderr)
    sys.exit(69)  # ExitCode.UNAVAILABLE; data.errors has not been imported yet
from typer.exceptions import TyperException
from typer.main import get_install_completion_arguments

from data.checks import printable_lines
from data.errors import ExitCode, UsageError, exit_code
from jobs.answer import Answer, Document
from jobs.commands.lazy_group import CommandTable, LazyGroup
from jobs.terminal import activity, echo, handle_of, program, typed_recipe, write_last, writing_stdout

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

EXIT_CODES = (
    "Exit codes: 0 success · 64 usage · 65 data · 69 cluster or storage unavailable · 70 diverged, or internal error · "
    "73 run in use by another process · 74 I/O error, or bad checkpoint · 75 stopped after a commit; run the command "
    "again to resume · 78 configuration · 130 interrupted (a run: by a second Ctrl-C)"
)

KEY_MEANT = "jobs.extras.mistyped_overrides:key_meant"
OLD_SPELLINGS = "jobs.extras.checkpoints.old_spellings:command_today"
JSON_OUTPUT = "jobs.extras.json_output:print_document"
VERSION = "0.1.0"  # as in pyproject.toml
HELP = {"-h", "--help"}
STREAMS = {"logs", "run"}  # commands that stream worker or job output and show their own progress
RUNS_RECIPES = ("run", "plan", "submit", "trial", "preflight")  # commands whose output goes to the recipe's run
# Commands with an option --output, and an example of its value.
OUTPUTS = {
    "analyze": "pictures",
    "leaks": "leaks",
    "new": "photos.yaml",
    "predict": "predictions.csv",
    "report": "report.html",
    "subset": "part",
}
WITHOUT_OUTPUT = ("status", "checkpoints", "stop", "list", "logs")  # commands that only read or change a run
UNWRITTEN_CODE = 120  # Python's exit code if it cannot write the rest of its output
SIGPIPE_CODE = 128 + signal.SIGPIPE  # the exit code that shells report for a program killed by a closed pipe
# Names of the same commands in other programs, used to suggest ours after an unknown command.
OTHER_COMMANDS = {
    "run": "train fit start launch resume pretrain finetune",
    "evaluate": "eval test validate",
    "import": "convert load",
    "predict": "infer classify",
    "plan": "dry-run validate-recipe config",
}
# Extras of the training stages (jobs/stages/training.py).
TRAINING_EXTRAS = (
    "jobs.extras.studies.law:Branches",
    "jobs.extras.token_dropping:TokenDroppingExtra",
    "jobs.extras.async_evaluation.extra:AsyncEvaluationExtra",
    "jobs.extras.best:Best",
    "jobs.extras.engine_check:EngineCheckExtra",
    "jobs.extras.finite_weights:FiniteWeights",
    "jobs.extras.live_audit:LiveAuditExtra",
    "jobs.extras.new_schedule:NewSchedule",
    "jobs.extras.planning.memory_check:MemoryCheck",
    "jobs.extras.reevaluation:Reevaluation",
    "jobs.extras.slow_worker:SlowWorkerExtra",
    "jobs.extras.usage:UsageExtra",
)
# Stage kinds by their name in a recipe, each followed by its extras. Extras may be missing from a checkout.
KINDS = {
    "pack": "jobs.extras.packing.stage:Pack jobs.extras.packing.changed_sources:ChangedSources",
    "pretrain": " ".join(["jobs.stages.training:Pretrain", *TRAINING_EXTRAS]),
    "resize": "jobs.stages.resize:Resize",
    "finetune": " ".join(["jobs.stages.training:Finetune", *TRAINING_EXTRAS]),
    "fewshot": "jobs.stages.fewshot:FewShot",
    "evaluate": "jobs.stages.evaluate:Evaluate",
    "sweep": "jobs.extras.studies.table:Table",
    "figure": "jobs.extras.studies.figure:Figure",
}

# Outputs of a run other than its log: suggested commands, the HTML report, Prometheus gauges, experiment trackers
# (jobs/run/watchers.py).
WATCHERS = (
    "jobs.extras.next_commands:NextCommands",
    "jobs.extras.report.page_watcher:PageWatcher",
    "jobs.extras.monitor.gauges:Gauges",
    "jobs.extras.monitor.trackers:Trackers",
)

COMMANDS = CommandTable(
    {
        "Train": {
            "new": ("jobs.extras.new.command:new", "Write a recipe for your images.", "photos"),
            "plan": (
                "jobs.extras.planning.command:plan",
                "Forecast memory, time and cost of a recipe; starts nothing.",
                "digits",
            ),
            "trial": (
                "jobs.extras.planning.command:trial",
                "Measure a recipe's speed: 30 steps of each training stage.",
                "digits",
            ),
            "preflight": (
                "jobs.extras.planning.command:preflight",
                "Test the machines for a recipe: workers, links, disks, data.",
                "digits",
            ),
            "run": (
                "jobs.commands.campaigns:run",
                "Run a recipe, or resume it with the same command.",
                "digits pretrain.optim.lr=1e-3",
            ),
        },
        "Follow": {
            "status": (
                "jobs.commands.status:status",
                "Show a run's stages: step, loss, speed, ETA, last checkpoint.",
                "runs/digits",
            ),
            "report": (
                "jobs.extras.report.command:report",
                "Write an HTML page of one run, or of several for comparison.",
                "runs/photos",
            ),
            "checkpoints list": (
                "jobs.extras.checkpoints.stored:list_all",
                "List the checkpoints of each stage.",
                "runs/digits",
            ),
            "checkpoints verify": (
                "jobs.extras.checkpoints.contents:verify_all",
                "Verify every file of each checkpoint by its digest.",
                "runs/digits/pretrain/step-50",
            ),
            "checkpoints inspect": (
                "jobs.extras.checkpoints.contents:inspect",
                "Print a checkpoint's manifest and parameters.",
                "runs/digits/pretrain/step-50",
            ),
            "checkpoints prune": (
                "jobs.extras.checkpoints.stored:prune",
                "Delete all but the newest checkpoints of each stage.",
                "runs/digits --keep 2",
            ),
            "stop": (
                "jobs.extras.submit.command:stop",
                "Stop a run after it has committed a checkpoint.",
                "/shared/runs/digits",
            ),
        },
        "Ray cluster": {
            "submit": (
                "jobs.extras.submit.command:submit",
                "Submit a recipe to a Ray cluster as a job.",
                "digits run=/shared/runs/digits --wait",
            ),
            "list": (
                "jobs.extras.submit.command:list_jobs",
                "List the submitted jobs, with the reason if one waits.",
                "",
            ),
            "logs": (
                "jobs.extras.submit.command:logs",
                "Follow the output of a submitted job by its run.",
                "/shared/runs/digits",
            ),
        },
        "Data": {
            "pack": (
                "jobs.extras.packing.command:pack",
                "Pack images into shards with an index.",
                "folder photos/train shards/train",
            ),
            "index": ("jobs.extras.packing.command:index", "Index existing WebDataset tars in place.", "shards/theirs"),
            "subset": (
                "jobs.extras.subset:subset",
                "Select samples of a data set without packing them again.",
                "shards/photos --part :90% --output shards/part",
            ),
            "data list": (
                "jobs.extras.doctor.command:list_samples",
                "List every sample: key, tar, classes.",
                "runs/photos/parts/held-out",
            ),
            "data stats": (
                "jobs.extras.doctor.command:stats",
                "Summarise image sizes and classes, from headers only.",
                "shards/train",
            ),
            "data check": (
                "jobs.extras.doctor.command:check",
                "Decode every sample, and report the unusable ones.",
                "shards/train",
            ),
            "data repair": (
                "jobs.extras.doctor.command:repair",
                "Pack the usable samples into a new data set.",
                "shards/train shards/repaired",
            ),
            "leaks": (
                "jobs.extras.leaks.command:leaks",
                "Find training images that are also in a test set.",
                "shards/train --test shards/test --output leaks",
            ),
        },
        "Weights": {
            "import": (
                "jobs.extras.conversion:import_foreign",
                "Convert official, timm or transformers weights to ours.",
                "vit_b16.npz weights/b16",
            ),
            "export": (
                "jobs.extras.conversion:export",
                "Write a stage's or a checkpoint's weights, ours or timm's.",
                "runs/photos/pretrain exported --format timm",
            ),
            "evaluate": (
                "jobs.extras.evaluate:evaluate",
                "Measure the accuracy of weights on labelled data sets.",
                "runs/photos/pretrain runs/photos/parts/held-out",
            ),
            "predict": (
                "jobs.extras.predict.command:predict",
                "Classify a folder of images: a table and a page.",
                "runs/photos/pretrain photos/cat",
            ),
            "analyze": (
                "jobs.extras.analyze.command:analyze",
                "Draw attention maps, attention distances and filters.",
                "runs/photos/pretrain photos/cat --output pictures",
            ),
        },
        "Investigate": {
            "diff": (
                "jobs.extras.diff.command:diff",
                "Compare settings of recipes or runs, or tensors of weights.",
                "digits table3/vit_i1k",
            ),
            "replay": (
                "jobs.extras.replays.command:replay",
                "Show the images of one step as the workers saw them.",
                "runs/photos/pretrain step=120",
            ),
            "audit": (
                "jobs.extras.replays.command:audit",
                "Repeat random steps of a run and compare them bit for bit.",
                "runs/photos/pretrain",
            ),
            "bisect": (
                "jobs.extras.replays.command:bisect",
                "Find the samples that caused a loss spike.",
                "runs/photos/pretrain step=120",
            ),
            "without": (
                "jobs.extras.replays.command:without",
                "Repeat a training run without some of its samples.",
                "runs/photos/pretrain --samples bad.txt",
            ),
        },
    },
    kinds=KINDS,
    watchers=WATCHERS,
    groups={
        "checkpoints": "List, verify, inspect or prune a run's checkpoints.",
        "data": "List, summarise, check or repair the samples of a data set.",
    },
)


def run_process() -> NoReturn:
    """Run the command given by sys.argv, and exit with its exit code."""
    open_streams()
    leave(main())


def open_streams() -> None:
    """Open the closed ones of stdin, stdout and stderr, and replace characters that a terminal's encoding lacks.

    Without this, the next file to be opened, for example a checkpoint, would get the descriptor of a closed stream and
    receive what child processes print.
    """
    for handle, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, handle)
            setattr(sys, name, os.fdopen(handle, mode, closefd=False))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_answer(answer: Answer) -> None:
    """Print the lines of an answer. Raises OutputError if stdout cannot be written."""
    lines = answer.lines()
    with writing_stdout():
        for line in lines:
            print(line) if answer.is_table else echo(line)
        sys.stdout.flush()


def leave(code: int) -> NoReturn:
    """Exit with this code, even if other threads are still running.

    A daemon thread may still be inside C++ code, for example while it draws the report. A normal interpreter exit
    unwinds that thread, and the process aborts with exit code 134 (SIGABRT) instead.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    if not others:
        sys.exit(code)
    atexit._run_exitfuncs()  # private, but the only way to run exit handlers such as Ray's before `os._exit`
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or UNWRITTEN_CODE
    os._exit(code)


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; print errors to stderr, or as a document if --json is given."""
    words = sys.argv[1:] if arguments is None else arguments
    # Without a command, print the help, as `git` and `ray` do.
    words = words or ["--help"]
    try:
        if "--json" in words and not HELP.intersection(words):
            print_document: Callable[..., int] = resolve_name(JSON_OUTPUT)
            return print_document(words, partial(execute, words), partial(explained, words=words))
        with prepared(words) as run_command:
            answer = as_answer(run_command())
        print_answer(answer)
        return answer.code
    except typer.Exit as end:  # after --help
        return end.exit_code
    except KeyboardInterrupt as interrupt:
        # During a run, the first Ctrl-C requests a commit; only the second raises this exception, with a message
        # (jobs/run/session.py).
        write_last(str(interrupt) or "interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:
        # The reader has closed the pipe, as in `patchline plan … | head`: exit without a message.
        if isinstance(error, BrokenPipeError) and is_closed_pipe(sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return SIGPIPE_CODE
        activity.end()
        return report(error, words)
    finally:
        activity.end()


def execute(words: Sequence[str]) -> Answer:
    """Run a command and return its answer. Raises typer.Exit after the text of --help has been printed."""
    with prepared(words) as run_command:
        return as_answer(run_command())


@contextmanager
def prepared(words: Sequence[str]) -> Iterator[Callable[[], object]]:
    """Parse the arguments, and yield a function that runs the command. Raises typer.Exit if the help was printed."""
    typed_recipe.clear()
    if words[0] == "--version":
        yield version
        return
    parser = LazyGroup(COMMANDS, "patchline", help="Large-scale pretraining of Vision Transformers.", epilog=EXIT_CODES)
    parser.params += get_install_completion_arguments()
    if "_PATCHLINE_COMPLETE" in os.environ:
        # The shell requests completions: print them and exit.
        parser.main(prog_name="patchline")
    with parser.make_context(program(), list(words), obj=COMMANDS) as context:
        if not STREAMS.intersection(words[:1]):
            activity.now(f"{' '.join(words[:1])}: starting …")
        yield partial(parser.invoke, context)


def as_answer(result: object) -> Answer:
    """Convert what a command returns, an Answer, an exit code or None, to an Answer."""
    activity.end()
    if isinstance(result, Answer):
        return result
    return Answer({}, code=result if isinstance(result, int) else ExitCode.DONE)


def version() -> Answer:
    """Return the commit of this checkout, and the versions of Python and of the packages that affect results."""
    from pipeline.identity import git_commit, package_versions

    document = {"patchline": VERSION, "commit": git_commit(), "packages": package_versions()}
    return Answer(document, version_lines)


def version_lines(document: Document) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in document["packages"].items())
    return [f"patchline {document['patchline']}, commit {document['commit'] or 'unknown'}", packages]


def usage_message(error: TyperException, words: Sequence[str]) -> str:
    """Return the message of a usage error, with hints on how to correct the command."""
    context = getattr(error, "ctx", None)
    # typer parses values with pydantic, which adds "Value error," and puts each choice on a separate line.
    message = " ".join(error.format_message().replace("Value error, ", "").split())
    for meant, others in OTHER_COMMANDS.items():
        if words and words[0] in others.split():
            # Replace typer's suggestion, which is based on spelling only.
            message = message.partition(" Did you mean")[0]
            message += f"\n  use {meant} instead: {program()} {meant} --help"
    with suppress(ImportError):
        command: str = resolve_name(OLD_SPELLINGS)(words)
        if command:
            return f"{' '.join(words[:2])} was changed\n  instead, run {command}"
    if words and words[0].endswith(".yaml"):
        message += f"\n  to run a recipe, run {program()} run {shlex.quote(words[0])}"
    option = getattr(error, "option_name", None)
    if option and words[0] in RUNS_RECIPES:
        message += "\n  write recipe keys without dashes"
        with suppress(ImportError):
            message += f": {resolve_name(KEY_MEANT)(option, words)}"
        if option in ("--minutes", "--model", "--init", "--unlabelled"):
            message += f"\n  {option} is an option of the command new, which writes a recipe"
    parameter = getattr(error, "param", None)
    takes_recipe = parameter is not None and parameter.name == "recipe"
    example = COMMANDS.example(" ".join(words[:2])) or COMMANDS.example(" ".join(words[:1]))
    if example and not takes_recipe and (parameter is not None or context is None):
        message += f"\n  for example: {program()} {example}"
    if takes_recipe:
        from jobs.commands.campaigns import shipped

        names = ", ".join(name for name in shipped() if "/" not in name)
        message += f"\n  expected a YAML file or a built-in recipe: {names}"
    if context is not None:
        message += f"\n  for help, run {context.command_path} --help"
    return message


def missing_extra(error: ImportError) -> Exception:
    """Return the error to report for a failed import: UsageError if the module belongs to a deleted extra."""
    module = error.name or ""
    # For `from pipeline.extras import best`, `error.name` is only "pipeline.extras"; the message has the module.
    missing = re.match(r"cannot import name '(\w+)'", error.msg or "")
    if module.endswith(".extras") and missing is not None:
        module += f".{missing[1]}"
    elif ".extras" not in module or not isinstance(error, ModuleNotFoundError):
        return error
    return UsageError(
        f"this command needs {module.replace('.', '/')}, which is not in this checkout\n"
        "  restore the folder from the repository; other commands work without it"
    )


def explained(error: Exception, words: Sequence[str]) -> tuple[Exception, str]:
    """Return the error that determines the exit code, and its message; describe unexpected exceptions as bugs."""
    if isinstance(error, TyperException):
        error = UsageError(usage_message(error, words))
    if isinstance(error, ImportError):
        error = missing_extra(error)
    if isinstance(error, OSError):
        from jobs.os_errors import explain  # imports OpenSSL, which would slow down --help

        return error, explain(error, way_elsewhere(words))
    # A diverged run also exits with 70, but its error has the attribute `exit_code`. An error without it is a bug.
    if exit_code(error) == ExitCode.INTERNAL and not hasattr(error, "exit_code"):
        return error, f"{type(error).__name__}: {error}\n  this is a bug in Patchline; --debug prints the traceback"
    return error, str(error)


def way_elsewhere(words: Sequence[str]) -> str | None:
    """Return the end of "use another folder" for a command: how to set its output; None if it has no output."""
    if words[0] in RUNS_RECIPES:
        return ": run=/elsewhere"
    if words[0] in OUTPUTS:
        return f": --output /elsewhere/{OUTPUTS[words[0]]}"
    return None if words[0] in WITHOUT_OUTPUT else ""


def report(error: Exception, words: Sequence[str]) -> int:
    """Print an error's message to stderr, for a usage error after the command's usage; return the exit code."""
    if "--debug" in words and not isinstance(error, TyperException):
        traceback.print_exc()
    context = getattr(error, "ctx", None)
    if context is not None:
        print(context.get_usage(), file=sys.stderr)
    error, text = explained(error, words)
    code = exit_code(error)
    # A stop after a commit is not an error: the message says how to resume.
    if code != ExitCode.PREEMPTED:
        text = f"error: {text}"
    # `write_last` does not block if the terminal is stuck, so that the process can exit.
    write_last(printable_lines(text))
    return code


def is_closed_pipe(stream: TextIO) -> bool:
    """Return whether a stream is a pipe whose reader has closed it."""
    handle = handle_of(stream)
    if handle is None:
        return False
    poll = select.poll()
    poll.register(handle, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    run_process()
