"""The output of a command with `--json`: one document on stdout, and everything else on stderr.

    {"schema": "status.1", "code": 0, "run": "/data/runs/digits", "stages": […]}
    {"schema": "error.1", "code": 64, "what": "no run at x", "why": "expected a run directory …", "next": […]}

1. Redirect stdout to stderr while the command runs, also for Ray's C++ code and for child processes.
2. Print the document of the command's answer, or the document of its error.

`next` lists alternatives, the best one first. Each is a mapping with the key `do`:

    instead   run `command` in place of the command that failed
    first     run `command`, then repeat the command that failed
    repeat    repeat the command that failed, after what `text` says
    edit      in the file `path`, replace the word `replace` with `by`, then repeat the command that failed
    fix       outside Patchline, provide what `need` names (FIXES), at `path` or under `name`; then repeat the command
    read      a person must read `text` and decide
    run       after a success, the next command

The steps after an error are derived here from the lines of its message, whose form is described in data/errors.py.
Errors pass between processes as text, so the message is the only information that is always available.
"""

import contextlib
import difflib
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
from jobs.extras.data_commands import similar_path
from jobs.terminal import as_typed, handle_of, program, write_last, writing_stdout

GROUPS = ("checkpoints", "data")  # commands of two words
SUGGESTED = re.compile(r"[Dd]id you mean ['\"]?([^\s'\"?]+)['\"]?(?: or [^?]*)?\?|Possible options: ([^\s,)]+)")
WORDS = re.compile(r"[\w/+-]+")
STAGE = re.compile(r"([\w.-]+): ")  # beginning of the message of a stage's error
NEAREST = re.compile(r"([\w.]+) \S+ is not .*; nearest: (\S+)")
OPTION = re.compile(r"\b(?:add|pass) (--[a-z-]+\b(?! [A-Z])(?: \d\S*)?)")
OVERRIDE = re.compile(
    r"(?:\bset|\buse|\bpass|\bto|for example|without (?:it|them):) '?([a-z]\w*(?:\.[\w-]+)*=(?:\[[^\]]*\]|[^\s,;…']+))"
)
PLACEHOLDER = re.compile(r"=/elsewhere|=[A-Z]{3}")  # in an override: the user must choose the value
MISSING_SET = re.compile(r"(?:: |^)(\S+): this index does not exist")
AGAIN = re.compile(r"\b(run|repeat) (the same command|this command|the command|it) again|\bretry\b")
# First words of a line that says what to do. All other lines after the first say why.
VERBS = re.compile(
    r"(add|allow|ask|change|check|choose|copy|create|delete|exclude|export|fix|free|give|install|list|load|lower|make"
    r"|move|omit|pass|put|raise|remove|rename|repair|repeat|replace|request|restart|restore|retry|run|save|see|set|start"
    r"|stop|submit|to|try|undo|unset|use|wait|write)\b",
    re.IGNORECASE,
)
SIMILAR = 0.6  # difflib's ratio above which a typed word is the misspelled one
# What is missing outside Patchline, by the text of the message; the group is the path or the name.
FIXES = (
    ("space", "path", re.compile(r" needed under (/\S+) .* free\b")),
    ("space", "path", re.compile(r"No space left on device:? ?(/[^\s:;]+)?|Disk quota exceeded:? ?(/[^\s:;]+)?")),
    (
        "permission",
        "path",
        re.compile(r"(?:Operation not permitted|Permission denied|Read-only file system): (/[^\s:]+)"),
    ),
    ("variable", "name", re.compile(r"Environment variable '(\w+)' not found")),
    ("credentials", "path", re.compile(r"(\w+://\S+): (?:access )?denied\b")),
    ("file", "path", re.compile(r"(?:: |^)(\S+) has changed: |cannot load (\S+): ")),
    ("cluster", "name", re.compile(r"no response at (RAY_ADDRESS)=")),
)


def print_document(
    words: Sequence[str], execute: Callable[[], Answer], explain: Callable[[Exception], tuple[Exception, str]]
) -> int:
    """Run a command and print its document; return the exit code.

    `words` are the typed arguments. `explain` returns the error to report and its message.
    """
    with writing_stdout(), stdout_as_stderr() as stdout:
        code, text = document_of(words, execute, explain)
        stdout.write(f"{text}\n")
        stdout.flush()
    return code


def document_of(
    words: Sequence[str], execute: Callable[[], Answer], explain: Callable[[Exception], tuple[Exception, str]]
) -> tuple[int, str]:
    """Run a command; return its exit code, and its document or error as a line of JSON."""
    try:
        answer = execute()
        schema = f"{name_of(words)}.{answer.version}"
        return answer.code, as_json({"schema": schema, "code": answer.code, **answer.content()})
    except KeyboardInterrupt as interrupt:
        return exit_code(interrupt), as_json(error_document(interrupt, str(interrupt) or "interrupted", words))
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        error, message = explain(error)
        write_last(f"error: {message}")
        return exit_code(error), as_json(error_document(error, message, words))


def as_json(document: Document) -> str:
    """Return a document as one line of JSON."""
    return json.dumps(plain(document), ensure_ascii=False, allow_nan=False)


@contextlib.contextmanager
def stdout_as_stderr() -> Iterator[TextIO]:
    """Redirect everything written to stdout to stderr; yield a stream that writes to the real stdout."""
    stdout = sys.stdout
    if handle_of(stdout) is None:  # in memory, as in tests
        with contextlib.redirect_stdout(sys.stderr):
            yield stdout
        return
    stdout.flush()
    # Bytes of a file name that are not UTF-8 are surrogates in a string. They become escapes of JSON, such as \udcff.
    with os.fdopen(os.dup(stdout.fileno()), "w", encoding="utf-8", errors="backslashreplace") as real:
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
    """Convert a document to JSON types: paths become strings, and NaN and infinity become null."""
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
    """Return an error's document, derived from the lines of `message`: the problem, what was expected, and a remedy."""
    what, *rest = [line.strip() for line in as_typed(message).splitlines() if line.strip()] or [type(error).__name__]
    stage = STAGE.match(what)
    section = stage[1] if stage is not None else ""
    reasons = []
    steps = [*fixes(what, rest), *corrections(what, words), *settings(what, words, section)]
    for path in MISSING_SET.findall(message):
        near = similar_path(path)
        if near is not None:
            steps += corrected_steps(str(near), f"did you mean {str(near)!r}?", path, words)
    for line in rest:
        if "--help" in line:
            continue  # help is for people
        derived = [*corrections(line, words), *settings(line, words, section)] or advice(line)
        if not derived:
            reasons.append(line)
        steps += derived
    code = exit_code(error)
    if code == ExitCode.PREEMPTED and not any(step["do"] == "repeat" for step in steps):
        steps.insert(0, {"do": "repeat", "text": "run the same command again to resume"})
    unique: list[Step] = []
    for step in steps:
        is_said = step["do"] == "read" and any(step["text"] == other["text"] for other in unique)
        if step not in unique and not is_said:
            unique.append(step)
    return {
        "schema": "error.1",
        "code": code,
        "what": what,
        "why": "\n".join(reasons),
        "next": unique,
        **getattr(error, "details", {}),
    }


def fixes(what: str, rest: Sequence[str]) -> list[Step]:
    """Return a step for each resource that must be provided outside Patchline, such as disk space or a permission."""
    steps: list[Step] = []
    for need, field, pattern in FIXES:
        for line in (what, *rest):
            match = pattern.search(line)
            if match is not None:
                step: Step = {"do": "fix", "need": need, "text": rest[-1] if rest else what}
                if match.lastindex:
                    step[field] = match[match.lastindex]
                steps.append(step)
                break
    return steps


def settings(line: str, words: Sequence[str], section: str) -> list[Step]:
    """Return a step for each option or override in a line: run the typed command with this option or override.

    Overrides without a section apply to `section`, the stage that failed.
    """
    changed = []
    nearest = NEAREST.search(line)
    if nearest is not None:
        changed.append(f"{nearest[1]}={nearest[2]}")
    changed += [found for found in OVERRIDE.findall(line) if not PLACEHOLDER.search(found)]
    steps: list[Step] = []
    for override in changed:
        key = override.partition("=")[0]
        if section and "." not in section and not key.startswith((f"{section}.", "cluster.", "run")):
            override = f"{section}.{override}"
            key = f"{section}.{key}"
        others = [word for word in words if not word.startswith(f"{key}=")]
        steps.append({"do": "instead", "command": typed([*others, override]), "text": line})
    for option in OPTION.findall(line):
        steps.append({"do": "instead", "command": typed([*words, *option.split()]), "text": line})
    return steps


def advice(line: str) -> list[Step]:
    """Return the steps that a line of a message recommends; an empty list if the line only gives a reason."""
    commands = commands_in(line)
    if commands:
        do = "instead" if line.startswith("instead, ") else "first"
        return [{"do": do, "command": command, "text": line} for command in commands]
    if AGAIN.search(line):
        return [{"do": "repeat", "text": line}]
    if VERBS.match(line) or line.startswith(program()):
        return [{"do": "read", "text": line}]
    return []


def typed(words: Sequence[str]) -> str:
    """Return a Patchline command line with these arguments."""
    return shlex.join([*program().split(), *words])


def commands_in(line: str) -> list[str]:
    """Return the Patchline commands in a line, except for commands with placeholders such as RECIPE.

    A command ends at the end of the line, or at a word that ends with a comma or a semicolon.
    """
    commands = []
    before, *rest = line.split(f"{program()} ")
    for text in rest:
        words: list[str] = []
        for word in text.split():
            words.append(word.rstrip(",;"))
            if word.endswith((",", ";")):
                break
        # Words in capitals, such as RECIPE or FOLDER, stand for something that only the user knows. A command in
        # backticks is only mentioned.
        has_placeholder = any(word.isupper() and len(word) > 2 for word in words)
        if not before.endswith("`") and not has_placeholder:
            commands.append(f"{program()} {' '.join(words)}")
        before = text
    return commands


def similarity(first: str, second: str) -> float:
    """Return the similarity of two words, from 0 to 1."""
    return difflib.SequenceMatcher(None, first.lower(), second.lower()).ratio()


def corrections(line: str, words: Sequence[str]) -> list[Step]:
    """Return a step for "did you mean …?": correct the misspelled word in the typed command or in the recipe."""
    suggested = SUGGESTED.search(line)
    if suggested is None:
        return []
    return corrected_steps(suggested[1] or suggested[2], line, line.partition(suggested[0])[0], words)


def corrected_steps(right: str, line: str, before: str, words: Sequence[str]) -> list[Step]:
    """Return a step that replaces the misspelled word with `right`, in the typed command or in the recipe.

    `line` is the text of the step, and `before` the text with the misspelled word.
    """
    # The misspelled word is the part of the typed command that is most similar to the right one.
    best = 0.0
    corrected: list[str] = []
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        for wrong, whole in (
            (word, right),
            (value, f"{key}{equals}{right}"),
            *((part, f"{key.replace(part, right, 1)}{equals}{value}") for part in {key, *key.split(".")}),
        ):
            ratio = max(similarity(wrong, right), similarity(wrong, Path(right).stem) if Path(right).suffix else 0)
            if wrong != right and ratio > best:
                best = ratio
                corrected = [*words[:place], whole, *words[place + 1 :]]
    if best >= SIMILAR:
        return [{"do": "instead", "command": typed(corrected), "text": line}]
    # Otherwise the misspelled word is in the recipe.
    recipe = next((word for word in words[1:2] if Path(word).is_file()), None)
    candidates = WORDS.findall(before)
    close = difflib.get_close_matches(right, candidates, n=1, cutoff=SIMILAR)
    if recipe is None or not close:
        return [{"do": "read", "text": line}]
    return [{"do": "edit", "path": recipe, "replace": close[0], "by": right, "text": line}]
