"""A command group that imports a command's module only if the user types that command.

`--help`, shell completion and suggestions for misspelled names need only the table of commands:

    "run": ("jobs.commands.campaigns:run", "Run a recipe, or resume it with the same command.", "digits")

1. `LazyGroup` turns the table into placeholders, each with a name and a summary.
2. `resolve_command` imports the function of the typed command and builds its parser from the function's signature.

typer takes 0.1 s to import; torch, numpy and Ray take seconds. Commands therefore import these packages inside their
functions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from jobs.terminal import program

ROOT = Path(__file__).parents[2]
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@dataclass(frozen=True)
class CommandTable:
    """All commands, stage kinds and watchers. Commands read the table from their context as `context.obj`.

    A command is identified by the words that the user types, such as "data check". Its function is given as
    "module:name": the function's annotations define the arguments and options, and its docstring is the text of the
    command's own --help. The summary appears in the list of commands.
    """

    # heading in --help → words → (function, summary, arguments of the example in the command's own --help)
    sections: Mapping[str, Mapping[str, tuple[str, str, str]]]
    groups: Mapping[str, str]  # first word of a two-word command, such as "data" → summary of the group
    kinds: Mapping[str, str] = field(default_factory=dict)  # name in a recipe → "module:Class" of the stage kind
    watchers: Sequence[str] = ()  # "module:Class" of each watcher of a run (jobs/run/watchers.py)

    def load(self, words: str) -> Callable[..., Any]:
        """Import a command's function. Raises ModuleNotFoundError if the command's extra is not installed."""
        for commands in self.sections.values():
            if words in commands:
                function: Callable[..., Any] = resolve_name(commands[words][0])
                return function
        raise KeyError(words)

    def example(self, words: str) -> str:
        """Return an example of a command, without the program's name; "" for an unknown command."""
        for commands in self.sections.values():
            if words in commands:
                return f"{words} {commands[words][2]}".rstrip()
        return ""


class LazyGroup(TyperGroup):
    """A typer group with the commands of a `CommandTable`."""

    def __init__(self, table: CommandTable, name: str, prefix: str = "", **settings: Any) -> None:
        # rich_markup_mode=None, because rendering rich's panels takes longer than the rest of --help.
        super().__init__(name=name, rich_markup_mode=None, context_settings=SETTINGS, **settings)
        self.table = table
        self.prefix = prefix  # "data " in the group of "data check"
        self.names: dict[str, list[str]] = {}  # heading in --help → names of its commands
        for heading, commands in table.sections.items():
            for words, (function, summary, _example) in commands.items():
                if words.startswith(prefix):
                    if not is_installed(function):
                        summary = "Not installed."
                    self.add_placeholder(words.removeprefix(prefix), summary, heading)

    def add_placeholder(self, words: str, summary: str, heading: str) -> None:
        """Add a placeholder for a command; if the name has two words, add the group named by the first word."""
        name, _, rest = words.partition(" ")
        if name in self.commands:
            return
        if rest:
            self.add_command(LazyGroup(self.table, name, f"{name} ", help=self.table.groups[name]))
        else:
            self.add_command(TyperCommand(name, help=summary, rich_markup_mode=None))
        self.names.setdefault(heading, []).append(name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the user typed, built from its function instead of the placeholder."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not isinstance(command, LazyGroup):
            app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=SETTINGS)
            words = f"{self.prefix}{name}"
            example = f"Example: {program()} {self.table.example(words)}"
            app.command(name, epilog=example)(self.table.load(words))
            command = get_command(app)
            command.params += json_option()
        return name, command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under their headings; in a subgroup, under the single heading "Commands"."""
        headings = self.names
        if self.prefix:
            headings = {"Commands": list(self.commands)}
        limit = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in headings.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])


def json_option() -> list[Any]:
    """Return the option --json of all commands; `jobs.__main__.main` handles it, also if other arguments are wrong."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def template(
        json: Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/scripting.md).")] = False,
    ) -> None: ...

    options = get_command(app).params
    for option in options:
        option.expose_value = False
    return list(options)


def is_installed(function: str) -> bool:
    """Return whether the module of "module:name" exists; an extra's folder may have been deleted."""
    module = function.partition(":")[0]
    return ROOT.joinpath(*module.split(".")).with_suffix(".py").exists()
