"""Arguments and options shared by several commands."""

from typing import Annotated

import typer

# `jobs.__main__.main` handles --debug itself; commands declare it only for --help and shell completion.
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides of recipe keys, such as pretrain.optim.lr=1e-3."),
]
Recipe = Annotated[str, typer.Argument(help="A YAML file, or the name of a built-in recipe, such as digits.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Restart an unfinished stage from step 0 if its settings changed.")
]
Run = Annotated[str, typer.Argument(help="A run directory, or its URL (s3://…), as in the recipe's run: key.")]
