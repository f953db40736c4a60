"""The table of commands: the list in --help, lazy imports, and missing extras."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jobs.__main__
from jobs.__main__ import COMMANDS, main
from jobs.commands.lazy_group import CommandTable

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[3]
WORDS = [words for section in COMMANDS.sections.values() for words in section]

IMPORTED = """
import sys
from jobs.__main__ import main
main(sys.argv[1:])
print(*sorted(name for name in sys.modules if name.startswith(("jobs.commands.", "jobs.extras."))))
"""


@pytest.mark.parametrize("words", WORDS)
def test_every_command_has_a_function_with_a_docstring(words: str) -> None:
    assert inspect.getdoc(COMMANDS.load(words))


@pytest.mark.parametrize("words", WORDS)
def test_help_of_every_command_has_its_docstring_and_an_example(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: python -m jobs {words} " in out
    first_line = str(inspect.getdoc(COMMANDS.load(words))).splitlines()[0]
    assert " ".join(first_line.split()[:4]) in out
    assert f"\n  Example: python -m jobs {words}" in out
    debug = " ".join(out.split()).partition("--debug ")[2]
    assert debug.startswith("Print the traceback of an error. -"), "off by default"


def test_help_lists_each_command_once_with_a_complete_summary_in_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "..." not in out.partition("COMMAND [ARGS]...")[2]
    assert max(map(len, out.splitlines())) <= 80
    for commands in COMMANDS.sections.values():
        for words, (_function, summary, _example) in commands.items():
            assert " " in words or summary in out
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line.split()]
    for name in {words.split()[0] for words in WORDS}:
        assert listed.count(name) == 1, name


@pytest.mark.parametrize(
    ("words", "imported"),
    [
        (["--help"], "jobs.commands.lazy_group"),
        (["data", "--help"], "jobs.commands.lazy_group"),
        # An unknown command may be the old name of one.
        (["rnu"], "jobs.commands.lazy_group jobs.extras.checkpoints jobs.extras.checkpoints.old_spellings"),
        (
            ["diff", "--help"],
            "jobs.commands.arguments jobs.commands.campaigns jobs.commands.lazy_group jobs.extras.diff "
            "jobs.extras.diff.command",
        ),
    ],
)
def test_only_the_module_of_the_typed_command_is_imported(words: list[str], imported: str) -> None:
    command = [sys.executable, "-c", IMPORTED, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == imported


def test_a_command_of_a_deleted_extra_reports_it_and_other_commands_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {
        "status": ("jobs.commands.status:status", "Show it.", "x"),
        "mend": ("jobs.extras.gone.command:mend", "Mend.", "x"),
    }
    monkeypatch.setattr(jobs.__main__, "COMMANDS", CommandTable({"Runs": runs}, {}))
    assert main(["--help"]) == 0
    assert "mend    Not installed.\n" in capsys.readouterr().out
    assert main(["mend", "x"]) == 64
    assert "error: this command needs jobs/extras/gone, which is not in this checkout\n" in capsys.readouterr().err
    assert main(["status", "--help"]) == 0


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (
            "from data.extras import gone",
            64,
            "error: this command needs data/extras/gone, which is not in this checkout\n",
        ),
        (
            "import data.extras.gone.inside",
            64,
            "error: this command needs data/extras/gone, which is not in this checkout\n",
        ),
        ("from data.errors import gone", 70, "error: ImportError: cannot import name 'gone'"),
        ("from data.extras.survey import gone", 70, "error: ImportError: cannot import name 'gone'"),
    ],
)
def test_an_import_from_a_missing_extra_is_a_usage_error_and_a_wrong_name_is_a_bug(
    line: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(run: Path) -> None:
        exec(line)

    monkeypatch.setattr("jobs.commands.status.status_of", fail)
    assert main(["status", "."]) == code
    assert message in capsys.readouterr().err


def test_a_missing_core_module_is_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"mend": ("jobs.commands.gone:mend", "Mend.", "x")}
    monkeypatch.setattr(jobs.__main__, "COMMANDS", CommandTable({"Runs": runs}, {}))
    assert main(["mend"]) == 70
    assert "ModuleNotFoundError" in capsys.readouterr().err


def test_a_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"_PATCHLINE_COMPLETE": "complete_bash", "COMP_CWORD": "1", "COMP_WORDS": "patchline pre"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["preflight", "predict"]
    monkeypatch.setenv("COMP_WORDS", "patchline run --fr")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["--fresh"]
