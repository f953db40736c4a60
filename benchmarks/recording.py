"""Record the commands of docs/first-hour.md: type `new`, `run`, `report` and `export` into tmux, and write the page.

    python -m benchmarks.recording --minutes 0.5

The images are 1,797 handwritten digits in ten folders. The terminal has 100 columns. Its text is recorded during
training, with the progress bar at the bottom, and after each command. The temporary folder is shown as `~`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.first_hour import write_folders
from data.extras.sources.samples import digits
from pipeline.identity import git_commit

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-hour.md"
COLUMNS = 100
FIRST = 12  # lines kept at the beginning of a long output
LAST = 16  # lines kept at its end
HEAD = """# The first hour: a recorded session

This page shows a whole session in a terminal: `new` writes a recipe for a folder of images, `run` packs, trains and
evaluates, `report` renders the run as a page, `export` converts the weights for timm, and `status` summarizes the run.
To try it with your own images, type:

```
patchline new photos --minutes 0.5 && patchline run photos.yaml
```

Here the images are {images:,} handwritten digits in ten folders. `python -m benchmarks.recording` typed the commands
into tmux and wrote this page. The terminal is {columns} columns wide; `…` stands for omitted lines. Commit {commit},
{date}, two CPU cores{load}.

Inspect the images and write a recipe:
"""


class Tmux:
    """A shell in a separate tmux server."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "socket")
        self.folder = folder
        environment = {
            "HOME": str(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PS1": "$ ",
            "PROMPT_COMMAND": f"tmux -S {self.socket} wait-for -S prompt",
            "TERM": "xterm-256color",
        }
        shell = ["env", "-u", "PATCHLINE_REPORT", *(f"{name}={value}" for name, value in environment.items()), "bash"]
        size = ["-x", str(COLUMNS), "-y", "50"]
        self.ask("-f", "/dev/null", "new-session", "-d", *size, "-c", str(folder), *shell, "--noprofile", "--norc")
        self.ask("wait-for", "prompt")

    def ask(self, *words: str) -> str:
        """Run a tmux subcommand, and return its output."""
        done = subprocess.run(["tmux", "-S", self.socket, *words], capture_output=True, text=True, check=True)
        return done.stdout

    def begin(self, command: str) -> None:
        """Type a command on an empty screen."""
        self.ask("send-keys", "-R", ";", "clear-history")
        self.ask("send-keys", f" {command}", "Enter")

    def end(self) -> None:
        """Wait for the next prompt."""
        self.ask("wait-for", "prompt")

    def text(self) -> list[str]:
        """Return the lines of the command and its output, without the next prompt."""
        text = self.ask("capture-pane", "-p", "-S", "-").replace(str(self.folder), "~")
        command, *lines = [line.rstrip() for line in text.rstrip().splitlines()]
        if lines and lines[-1] == "$":
            lines.pop()
        return [f"$ {command.strip()}", *lines]


def shortened(lines: list[str], first: int, last: int) -> str:
    """Return a Markdown text block with the first and the last lines."""
    if len(lines) > first + last + 1:
        lines = [*lines[:first], "…", *lines[len(lines) - last :]]
    return "\n".join(["```", *lines, "```", ""])


def record(folder: Path, minutes: float) -> str:
    """Type the commands into tmux, and return the text of the page."""
    images = [*digits(train=True, image_size=32), *digits(train=False, image_size=32)]
    write_folders(images, folder / "photos", [str(number) for number in range(10)])
    load = os.getloadavg()[0]
    parts = []
    tmux = Tmux(folder)
    try:
        tmux.begin(f"patchline new photos --minutes {minutes:g}")
        tmux.end()
        parts.append(shortened(tmux.text(), FIRST, LAST))

        # During training, after a third of the steps.
        tmux.begin("patchline run photos.yaml")
        deadline = time.monotonic() + 600
        while "accuracy" not in "".join(tmux.text()) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(3)
        parts.append("Train. The last line is the progress bar:\n\n" + shortened(tmux.text(), FIRST, 8))
        tmux.end()
        text = shortened(tmux.text(), 1, LAST)
        parts.append(f"At the end, `run` prints a table of the stages and the next commands:\n\n{text}")

        for task, command in (
            ("Render the report page", "report runs/photos"),
            ("Export the weights for timm", "export runs/photos/pretrain exported --format timm"),
            ("Summarize the run", "status runs/photos"),
        ):
            tmux.begin(f"patchline {command}")
            tmux.end()
            parts.append(f"{task}:\n\n{shortened(tmux.text(), FIRST, LAST)}")
    finally:
        tmux.ask("kill-server")
    note = f", load {load:.0f}" if load > 1.5 else ""
    head = HEAD.format(
        columns=COLUMNS, images=len(images), commit=git_commit()[:7], date=time.strftime("%Y-%m-%d"), load=note
    )
    return "\n".join([head, *parts])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.5, help="training time, passed to `new`")
    parser.add_argument("--output", type=Path, default=PAGE)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        words.output.write_text(record(Path(temporary).resolve(), words.minutes))
    print(f"written  {words.output}")
