"""The output of a command with `--json`: one document on stdout, and everything else on stderr.

    {"schema": "status.1", "code": 0, "run": "/data/runs/digits", "stages": […]}
    {"schema": "error.1", "code": 64, "what": "no run at x", "why": "expected a run directory …", "next": […]}

1. Redirect stdout to stderr while the command runs, also for Ray's C++ code and for child processes.
2. Print the document of the command's answer, or the document of its error.

`next` lists alternatives, the best one first. Each is a mapping with the key `do`:

    instead   run `command` in place of the command that failed
    first     run `command`, then repeat the command that failed
    repeat    repeat the command that failed, after what `text` says
    edit      in the file `path`, replace the word `replace` with `by`, then repeat the command
    fix       change `need` (space, permission, variable, …) outside Patchline; `path` or `name` says where
    read      a person decides what to do; `text` says which choices there are

An error's steps come from its attribute `steps`, which is set at few places. All other steps are derived here from the
lines of the message, whose form is described in data/errors.py.
"""

import contextlib
import difflib
import errno
import json
import math
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from data.errors import ExitCode, exit_code
from jobs.answer import Answer, Document, Step
from jobs.terminal import as_typed, handle_of, program, write_last

GROUPS = ("checkpoints", "data")  # commands of two words
SUGGESTED = re.compile(r"[Dd]id you mean ['\"]?([^\s'\"?]+)['\"]?(?: or [^?]*)?\?|Possible options: ([^\s,)]+)")
WORDS = re.compile(r"[\w/+-]+")
AGAIN = re.compile(r"(run|repeat) (the same command|this command|the command|it|me) again|run it again|retry")
# First words of a line that says what to do. All other lines after the first say why.
VERBS = re.compile(
    r"(add|allow|ask|check|choose|copy|create|delete|exclude|export|fix|free|give|install|list|load|lower|make|move|omit"
    r"|pass|put|raise|remove|rename|repair|repeat|replace|restart|restore|retry|run|save|see|set|start|stop|submit|to|try"
    r"|undo|unset|use|wait|write)\b",
    re.IGNORECASE,
)
SIMILAR = 0.6  # difflib's ratio above which a typed word is the misspelled one
NEEDS = {
    errno.ENOSPC: "space",
    errno.EDQUOT: "space",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
}


def print_document(
    words: Sequence[str], execute: Callable[[], Answer], explain: Callable[[Exception], tuple[Exception, str]]
) -> int:
    """Run a command and print its document; return the exit code.

    `words` are the typed arguments. `explain` returns the error to report and its message.
    """
    with stdout_as_stderr() as stdout:
        try:
            answer = execute()
            document: Document = {
                "schema": f"{name_of(words)}.{answer.version}",
                "code": answer.code,
                **answer.content(),
            }
        except KeyboardInterrupt as interrupt:
            document = error_document(interrupt, str(interrupt) or "interrupted", words)
        except Exception as error:
            if "--debug" in words:
                traceback.print_exc()
            error, message = explain(error)
            write_last(f"error: {message}")
            document = error_document(error, message, words)
        stdout.write(json.dumps(plain(document), ensure_ascii=False, allow_nan=False) + "\n")
        stdout.flush()
    return int(document["code"])


@contextlib.contextmanager
def stdout_as_stderr() -> Iterator[TextIO]:
    """Redirect everything written to stdout to stderr; yield a stream that writes to the real stdout."""
    stdout = sys.stdout
    if handle_of(stdout) is None:  # in memory, as in tests
        with contextlib.redirect_stdout(sys.stderr):
            yield stdout
        return
    stdout.flush()
    with os.fdopen(os.dup(stdout.fileno()), "w", encoding="utf-8") as real:
        os.dup2(sys.stderr.fileno(), stdout.fileno())
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield real
        finally:
            os.dup2(real.fileno(), stdout.fileno())


def name_of(words: Sequence[str]) -> str:
    """Return the command's words joined by a dash, as in the name of its schema: "checkpoints-list"."""
    return "-".join(words[: 2 if words[0] in GROUPS else 1]).strip("-")


def plain(value: Any) -> Any:
    """Convert a document to JSON's types: paths become strings, and NaN and infinity null."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset | Iterator):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)


# ------------------------------------------------------------------------ errors


def error_document(error: BaseException, message: str, words: Sequence[str]) -> Document:
    """Return the document of an error; `message` has a line each for the problem, the expectation and the remedy."""
    what, *rest = [line.strip() for line in as_typed(message).splitlines() if line.strip()] or [type(error).__name__]
    reasons = []
    steps: list[Step] = list(getattr(error, "steps", ()))
    if isinstance(error, OSError) and error.errno in NEEDS:
        steps.append({"do": "fix", "need": NEEDS[error.errno], "path": str(error.filename or "."), "text": rest[-1]})
    steps += corrections(what, words)
    for line in rest:
        if "--help" in line:
            continue  # help is for people
        derived = [*corrections(line, words), *advice(line)]
        if not derived:
            reasons.append(line)
        steps += derived
    code = exit_code(error)
    if code == ExitCode.PREEMPTED and not any(step["do"] == "repeat" for step in steps):
        steps.insert(0, {"do": "repeat", "text": "run the same command again to resume"})
    unique = []
    for step in steps:
        if step not in unique:
            unique.append(step)
    return {
        "schema": "error.1",
        "code": code,
        "what": what,
        "why": "\n".join(reasons),
        "next": unique,
        **getattr(error, "details", {}),
    }


def advice(line: str) -> list[Step]:
    """Return the steps that a line of a message describes; an empty list if the line gives a reason."""
    command = command_in(line)
    if command:
        return [{"do": "first", "command": command, "text": line}]
    if AGAIN.search(line):
        return [{"do": "repeat", "text": line}]
    if VERBS.match(line):
        return [{"do": "read", "text": line}]
    return []


def command_in(line: str) -> str:
    """Return the command of ours in a line, without the text after it; "" if there is none, or if it has placeholders.

    A command ends at the end of the line, or at a word that ends with a comma or a semicolon.
    """
    _, start, rest = line.partition(f"{program()} ")
    words: list[str] = []
    for word in rest.split():
        words.append(word.rstrip(",;"))
        if word.endswith((",", ";")):
            break
    # Words in capitals, such as RECIPE or FOLDER, stand for something that only the user knows.
    if not start or any(word.isupper() and len(word) > 2 for word in words):
        return ""
    return f"{start}{' '.join(words)}"


def corrections(line: str, words: Sequence[str]) -> list[Step]:
    """Return a step for "did you mean …?": the typed command, or the recipe file, with the right word."""
    suggested = SUGGESTED.search(line)
    if suggested is None:
        return []
    right = suggested[1] or suggested[2]
    # The misspelled word is the part of the typed command that is most similar to the right one.
    best = 0.0
    corrected: list[str] = []
    for place, word in enumerate(words):
        for wrong in {word, word.partition("=")[0], word.partition("=")[2], *word.partition("=")[0].split(".")}:
            ratio = difflib.SequenceMatcher(None, wrong.lower(), right.lower()).ratio()
            if wrong != right and ratio > best:
                best = ratio
                corrected = [*words[:place], word.replace(wrong, right, 1), *words[place + 1 :]]
    if best >= SIMILAR:
        return [{"do": "instead", "command": shlex.join([*program().split(), *corrected]), "text": line}]
    # Otherwise the misspelled word is in the recipe.
    recipe = next((word for word in words[1:2] if Path(word).is_file()), None)
    candidates = WORDS.findall(line.partition(suggested[0])[0])
    close = difflib.get_close_matches(right, candidates, n=1, cutoff=SIMILAR)
    if recipe is None or not close:
        return [{"do": "read", "text": line}]
    return [{"do": "edit", "path": recipe, "replace": close[0], "by": right, "text": line}]
