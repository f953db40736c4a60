"""Errors of the command line, and exit codes after interrupts and unexpected errors."""

import contextlib
import errno
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from data.errors import Preempted
from data.files import import_path
from jobs.__main__ import COMMANDS, OUTPUTS, explained, main
from jobs.terminal import typed_command

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runn", "x"], "Did you mean 'run'?"),
        (["run", "x", "--frsh"], "--fresh"),
        (["checkpoints", "verfy", "x"], "Did you mean 'verify'?"),
        (["run"], "expected a YAML file or a built-in recipe: cifar10, cifar10_bit, digits"),
        (["checkpoints", "prune", "x", "--keep", "ten"], "'--keep'"),
        (["status", "/nowhere"], "no run at"),
    ],
)
def test_usage_errors_exit_with_64_and_a_suggestion(capsys, words, message):
    assert main(words) == 64
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["run", "-h"], ["checkpoints", "--help"], ["data", "check", "--help"]])
def test_help_exits_with_0_and_lists_debug_if_the_command_has_it(capsys, words):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Usage: python -m jobs" in out
    assert ("--debug" in out) == (words[-2:-1] in (["run"], ["check"]))


@pytest.mark.parametrize("words", [["--help"], ["checkpoints", "--help"], ["data", "--help"]])
def test_every_summary_fits_and_names_another_purpose(capsys, words):
    assert main(words) == 0
    out = capsys.readouterr().out
    summaries = [line.split(None, 1)[1] for line in out.splitlines() if re.match("  [a-z]+  ", line)]
    assert not any(summary.endswith("...") for summary in summaries), "a summary is cut off"
    assert len({tuple(summary.split()[:4]) for summary in summaries}) == len(summaries) > 3


COMMAND = re.compile(r"(?<![/\w])(?:python -m jobs|patchline|\bprogram\(\)\}) ([a-z]+)\b(?! \w*/)(?:[ ]([a-z]+))?")
ROOT = Path(__file__).parents[2]


def test_messages_documents_and_schemas_name_only_commands_that_exist():
    known = {words.split()[0] for section in COMMANDS.sections.values() for words in section}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "schemas").iterdir()]
    sources = [path for package in ("jobs", "pipeline", "data", "models") for path in (ROOT / package).rglob("*.py")]
    unknown = []
    names = 0
    for path in [*pages, *sources]:
        if path.name == "old_spellings.py":
            continue
        for first, second in COMMAND.findall(path.read_text()):
            names += 1
            is_group = first in COMMANDS.groups
            if first not in known or (is_group and second and not COMMANDS.example(f"{first} {second}")):
                unknown.append(f"{path.relative_to(ROOT)}: {first} {second}")
    assert not unknown
    assert names > 200


def test_no_words_print_the_help(capsys):
    assert main([]) == 0
    assert "Usage: python -m jobs" in capsys.readouterr().out


def test_version_names_the_commit_and_the_packages(capsys):
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert out.startswith(f"patchline {project['version']}, commit ")
    for package in ("torch", "deepspeed", "ray", "numpy"):
        assert f"{package} {importlib.metadata.version(package)}" in out


def test_recipe_on_stdin_is_refused_because_a_run_is_resumed_with_its_file(capsys):
    assert main(["plan", "-"]) == 78
    assert "save the recipe to a file first: cat > NAME.yaml" in capsys.readouterr().err


def test_folder_next_to_its_recipe_suggests_the_recipe(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    assert main(["run", "photos"]) == 78
    assert "python -m jobs new photos" in capsys.readouterr().err
    Path("photos.yaml").touch()
    assert main(["run", "photos/"]) == 78
    assert "did you mean photos.yaml?" in capsys.readouterr().err


@pytest.mark.parametrize(("program", "other"), [("python -m jobs", "patchline"), ("patchline", "python -m jobs")])
def test_hints_and_records_use_the_typed_program_name(capsys, monkeypatch, tmp_path, program, other):
    first = program.replace("python -m jobs", "jobs/__main__.py")
    monkeypatch.setattr(sys, "argv", [f"/somewhere/bin/{first}", "train", "x"])
    assert main(["train", "x"]) == 64
    assert main(["evaluate", str(tmp_path), "a=1"]) == 64
    (tmp_path / "status.json").touch()
    assert main(["run", str(tmp_path)]) == 78
    said = capsys.readouterr().err
    for line in (
        f"Usage: {program} [OPTIONS]",
        f"use run instead: {program} run --help",
        f"index or its folder, for example: {program} evaluate {tmp_path} runs/photos/parts/held-out",
        f"it is a run directory: use its recipe; for its progress, run {program} status {tmp_path}",
    ):
        assert line in said
    assert other not in said
    assert "trial" not in said
    assert typed_command().startswith("patchline train x" if program == "patchline" else "python ")


def test_an_unexpected_error_is_reported_as_a_bug_and_debug_prints_the_traceback(monkeypatch, capsys):
    def fail(run: Path) -> list[str]:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("jobs.commands.status.status_of", fail)
    assert main(["status", "x"]) == 70
    err = capsys.readouterr().err
    assert "error: ZeroDivisionError: by zero" in err
    assert "a bug" in err
    assert "Traceback" not in err
    assert main(["status", "--debug", "x"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error", "code", "message"),
    [
        (["status", "x"], KeyboardInterrupt(), 130, "interrupted\n"),
        (["run", "digits"], KeyboardInterrupt(), 130, "interrupted\n"),  # a first Ctrl-C, before the run has begun
        (["run", "digits"], KeyboardInterrupt("interrupted twice: the last"), 130, "interrupted twice: the last\n"),
        (["status", "x"], BrokenPipeError(), 74, ""),
        (["status", "x"], Preempted("stopped; run me again"), 75, "stopped; run me again\n"),
        (["status", "x"], Preempted("a\x1b[2Jb\nc\x9b"), 75, "a\\x1b[2Jb\nc\\x9b\n"),
    ],
)
def test_interrupts_and_closed_pipes_have_their_exit_codes(monkeypatch, capsys, words, error, code, message):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("jobs.commands.status.status_of", fail)
    monkeypatch.setattr("jobs.recipe.campaign.read_recipe", fail)
    assert main(words) == code
    assert capsys.readouterr().err.startswith(message)


# A daemon thread inside C++ code: it releases the interpreter's lock for each product, and takes it again.
THREAD_IN_C = """
import atexit, sys, threading, time
import torch
from jobs.__main__ import leave
matrix = torch.rand(300, 300)
def work():
    while True:
        torch.mm(matrix, matrix)
atexit.register(print, "exit function")
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
print("done", end="\\n")
{end}({code})
"""


@pytest.mark.parametrize("code", [0, 70, 75])
def test_process_with_a_daemon_thread_in_c_code_ends_with_the_exit_code_of_the_command(code):
    # With sys.exit in place of leave, this program ended with SIGABRT in 4 of 4 runs.
    program = THREAD_IN_C.format(end="leave", code=code)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "done\nexit function\n", "")


def test_process_without_other_threads_ends_normally():
    program = "import sys; from jobs.__main__ import leave; leave(75)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 75


@pytest.mark.parametrize("words", [["status", "x"], ["status", "x", "--json"]])
def test_full_disk_under_stdout_is_named_as_that_of_stdout(monkeypatch, capfd, words):
    monkeypatch.setattr("jobs.commands.status.status_of", lambda run: {"run": "x", "command": {}, "stages": []})
    monkeypatch.setattr("jobs.commands.status.status_lines", lambda document: ["line"])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code = main(words)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.flush()
        error = capfd.readouterr().err
        with contextlib.suppress(OSError):
            full.close()
    assert code == 74
    assert error.startswith("error: cannot write to stdout: No space left on device\n  redirect it to another disk")


def test_closed_streams_are_opened_and_unknown_characters_replaced(tmp_path):
    # Without open_streams, `file` would get the descriptor 1 of the closed stdout.
    program = (
        "from jobs.__main__ import open_streams; import sys; open_streams();"
        "file = open('file', 'w'); print('lost', flush=True); print(file.fileno(), '×', file=sys.stderr)"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": import_path(), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, check=True)
    number, character = done.stderr.split()
    assert int(number) > 2
    assert character == "?"
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["run", "x.yaml"], "use another disk: run=/elsewhere"),
        (["report", "runs/x"], "use another disk: --output /elsewhere/report.html"),
        (["predict", "runs/x/train", "photos"], "use another disk: --output /elsewhere/predictions.csv"),
        (["export", "runs/x/train", "out"], "use another disk"),
        (["checkpoints", "prune", "runs/x"], "to see the mount"),
    ],
)
def test_a_read_only_disk_suggests_what_the_command_understands(words, typed, tmp_path):
    error = OSError(errno.EROFS, "Read-only file system", str(tmp_path / "report.html"))
    _, text = explained(error, words)
    assert text.endswith(typed)


@pytest.mark.parametrize("command", OUTPUTS)
def test_commands_with_a_suggested_output_have_the_option(command, capsys):
    main([command, "--help"])
    assert "--output" in capsys.readouterr().out
