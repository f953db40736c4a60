"""Patchline's command line: `patchline COMMAND`, or `python -m jobs COMMAND`; `--help` lists the commands.

    patchline run digits pretrain.optim.lr=1e-3 --fresh
    patchline checkpoints verify runs/digits --step 50

1. This checkout comes first on the import path, so that no other package called `data` or `models` is taken for ours.
2. typer finds the command among those of jobs/command_line and calls its function with the words.
3. That function imports what it needs only now, so that `--help` answers at once.
4. Whatever ends the command becomes one message on stderr and an exit code, from the table in data/errors.py.
"""

import os
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
from typer.main import get_command

from data.checks import printable_lines
from data.errors import ExitCode, exit_code
from data.files import explain
from jobs.command_line import campaigns, checkpoints, cluster, leaks, replays, shards, weights
from jobs.command_line.words import make_group
from jobs.progress import activity
from jobs.terminal import COMMAND, is_closed_pipe, program, write_last

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

EXIT_CODES = (
    "Exit codes: 0 done · 64 usage · 65 data · 69 cluster or storage unavailable · 70 diverged or internal · "
    "73 run owned by another · 74 I/O, or a bad checkpoint · 75 stopped after committing, run me again · "
    "78 configuration · 130 interrupted (a run: twice)"
)

STREAMS = {"demo", "logs", "run"}  # commands that print what others write, and show that they live
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

app = make_group("Large-scale pretraining of Vision Transformers.", epilog=EXIT_CODES, completion=True)
app.add_typer(campaigns.commands)
app.add_typer(checkpoints.commands, name="checkpoints")
app.add_typer(cluster.commands)
app.add_typer(weights.commands)
app.add_typer(shards.commands)
app.add_typer(shards.data_commands, name="data")
app.add_typer(leaks.commands)
app.add_typer(replays.commands)


def main(arguments: list[str] | None = None, *, kind: str | None = None) -> int:
    """Run the command that the words name and return its exit code; an error has become a message on stderr.

    With `kind` the words are a recipe, and its one stage of that kind runs: `python -m jobs.pretrain RECIPE`.
    """
    words = sys.argv[1:] if arguments is None else arguments
    prog_name = program()
    parser = get_command(app)
    if kind is not None:
        prog_name = f"{COMMAND}.{kind}"
        parser = get_command(campaigns.single_stage)
    if "_PATCHLINE_COMPLETE" in os.environ:
        # A shell asks how a word may go on; this answers and ends the process.
        parser.main(prog_name="patchline")
    try:
        with parser.make_context(prog_name, list(words), obj=kind) as context:
            if not STREAMS.intersection(words[:1]) and kind is None:
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
        names = ", ".join(name for name in campaigns.shipped() if "/" not in name)
        print(f"  expected a YAML file, or a recipe that ships: {names}", file=sys.stderr)
    if context is not None:
        print(f"  {context.command_path} --help tells more", file=sys.stderr)
    return ExitCode.USAGE


def report(error: Exception, *, with_traceback: bool) -> int:
    """Print an error's message, and that it is a bug where Patchline raises no such error; returns the exit code."""
    if with_traceback:
        traceback.print_exc()
    code = exit_code(error)
    text = explain(error) if isinstance(error, OSError) else str(error)
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
