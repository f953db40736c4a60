"""A script that brings commands to a successful end by what their JSON documents say, without a regular expression.

    python -m tests.support.campaign_script run digits run=runs/mine pretrain.optm.lr=1e-3

    code 78: unknown key pretrain.optm; did you mean 'optim'?
      instead: python -m jobs run digits run=runs/mine pretrain.optim.lr=1e-3
    code 0

1. Run a command with --json and read its document. After exit code 0, the command has ended well.
2. Otherwise, carry out the first step of `next` that this failure has not tried yet: run another command, edit a file,
   or provide what is missing. What a step with "fix" needs (space, a token, …), only the site knows: `hands` has a
   function for each need.
3. Repeat. A failure without an untried step ends the script.

A killed command leaves no document; `status` then says how to resume. tests/test_scripting.py plants failures.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Document = dict[str, Any]
Words = list[str]  # a command's arguments, without the program's name

PROGRAM = ["python", "-m", "jobs"]  # how the commands in documents begin
MOST_COMMANDS = 12  # for one command to end well
PAUSE_S = 1.0  # before a command is repeated


class GivenUpError(Exception):
    """No document names a step that the script can still try."""


class Killed(Exception):
    """The command was killed and has left no document."""


def run_command(words: Words) -> Document:
    """Run a command in a separate process and return its document. Raises Killed."""
    done = subprocess.run([sys.executable, "-m", "jobs", *with_json(words)], stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise Killed(shlex.join(words))
    document: Document = json.loads(done.stdout)
    assert document["code"] == done.returncode
    return document


def with_json(words: Words) -> Words:
    """Return the arguments with --json, once."""
    return [*(word for word in words if word != "--json"), "--json"]


class Script:
    """Brings commands to a successful end."""

    def __init__(
        self,
        hands: Mapping[str, Callable[[Document], None]],
        *,
        run: Callable[[Words], Document] = run_command,
        log: Callable[[str], None] = print,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.hands = hands  # need of a "fix" step → function that provides it
        self.run = run
        self.log = log
        self.pause_s = pause_s

    def finish(self, words: Words, folder: str = "") -> Document:
        """Run a command until it ends well, and return its document; `folder` is its run, for a killed command."""
        tried: list[tuple[str, str]] = []  # what happened, and the step that was tried after it
        for _ in range(MOST_COMMANDS):
            try:
                document = self.run(words)
            except Killed:
                self.log(f"killed: {shlex.join(words)}")
                words = self.resume(folder)
                continue
            self.log(f"code {document['code']}: {document.get('what', '')}")
            if document["code"] == 0:
                return document
            words = self.after(document, words, tried)
        raise GivenUpError(f"{MOST_COMMANDS} commands were not enough: {shlex.join(words)}")

    def resume(self, folder: str) -> Words:
        """Return the command that resumes a run whose command was killed."""
        for step in self.run(["status", folder])["next"]:
            if step["do"] == "instead":
                return arguments(step["command"])
        raise GivenUpError(f"the status of {folder} does not say how to resume it")

    def after(self, document: Document, words: Words, tried: list[tuple[str, str]]) -> Words:
        """Carry out the first step that was not tried yet; return the command to run next. Raises GivenUpError."""
        for step in document["next"]:
            this = (document["what"], json.dumps(step))
            if this in tried or not self.can(step):
                continue
            tried.append(this)
            self.log(f"  {step['do']}: {step.get('command', step['text'])}")
            return self.carry_out(step, words)
        raise GivenUpError(f"nothing left to try after: {document['what']}")

    def can(self, step: Document) -> bool:
        """Return whether the script can carry out a step."""
        if step["do"] == "fix":
            return step["need"] in self.hands
        return step["do"] in ("instead", "first", "repeat", "edit")

    def carry_out(self, step: Document, words: Words) -> Words:
        """Carry out a step and return the command to run next."""
        if step["do"] == "instead":
            return arguments(step["command"])
        if step["do"] == "first":
            first = self.finish(arguments(step["command"]))
            # A command that writes a new data set: use it in place of the bad one.
            if "replaces" in step:
                return [word.replace(step["replaces"], step["writes"]) for word in words]
            self.log(f"  done: {first['schema']}")
        elif step["do"] == "edit":
            path = Path(step["path"])
            path.write_text(path.read_text().replace(step["replace"], step["by"]))
        elif step["do"] == "fix":
            self.hands[step["need"]](step)
            if step["need"] == "permission":
                # The hand has made another folder.
                return [word.replace(step["path"], step["elsewhere"]) for word in words]
        else:
            time.sleep(self.pause_s)
        return words


def arguments(command: str) -> Words:
    """Return the arguments of a command line in a document."""
    words = shlex.split(command)
    assert words[: len(PROGRAM)] == PROGRAM, f"not a command of ours: {command}"
    return words[len(PROGRAM) :]


def main(words: Sequence[str]) -> int:
    """Bring one command to its end, with no hands: variables must be set and disks freed by a person."""
    try:
        Script({}).finish(list(words), folder=os.environ.get("RUN", ""))
    except GivenUpError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
