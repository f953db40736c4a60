"""`patchline import|export|analyze|evaluate`: weights in, out, looked at, and judged."""

from typing import Annotated, Literal

import typer

from jobs.command_line.words import Debug, make_group

ForeignPath = Annotated[
    str, typer.Argument(help="An official .npz; a folder or .safetensors file of ours, timm or transformers.")
]
NewFolder = Annotated[
    str, typer.Argument(help="Where weights.safetensors and model.json go: what a recipe's init: names.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What the file cannot tell, as heads=3.")
]
ClassList = Annotated[
    str | None,
    typer.Option("--names", metavar="FILE", help="Class names, one a line; else those that the file has."),
]
OurFolder = Annotated[str, typer.Argument(help="Our weights: a stage's folder, or what `import` wrote.")]
Target = Annotated[str, typer.Argument(help="The file (npz) or folder to write.")]
Format = Annotated[Literal["safetensors", "npz", "timm", "hf"], typer.Option(help="Whose format.")]
AnyWeights = Annotated[str, typer.Argument(help="A folder of weights, or a file that `import` takes.")]
Images = Annotated[list[str], typer.Argument(help="Image files, folders of them, or tar shards.")]
Output = Annotated[str, typer.Option(metavar="DIR", help="Where the pictures and numbers go.")]
Limit = Annotated[int, typer.Option(help="At most so many images; the paper takes 128.")]
SetsAndOverrides = Annotated[
    list[str],
    typer.Argument(
        metavar="SET… [KEY=VALUE…]", help="Indexes to judge on; train=INDEX; knn.k=[20], cluster.workers=4."
    ),
]
ProtocolNames = Annotated[
    list[str] | None,
    typer.Option("--protocol", help="top-1, top-5, real, per-class, fewshot, linear, knn, logistic; several times."),
]
DocumentFolder = Annotated[
    str | None, typer.Option(metavar="DIR", help="Where evaluation.json goes; else runs/evaluate-<weights>.")
]

commands = make_group()


@commands.command("import")
def import_foreign(
    path: ForeignPath,
    directory: NewFolder,
    overrides: Overrides = None,
    names: ClassList = None,
    _debug: Debug = False,
) -> None:
    """Write official, timm or transformers weights as ours."""
    from jobs.commands.weights import import_weights

    import_weights(path, directory, overrides=overrides or [], class_list=names)


@commands.command()
def export(directory: OurFolder, path: Target, format: Format, _debug: Debug = False) -> None:
    """Write our weights as official, timm or transformers ones."""
    from jobs.commands import stored_runs
    from jobs.commands.weights import export_weights

    stored_runs.refuse_as_weights(directory, "export")
    export_weights(directory, path, format)


@commands.command()
def analyze(weights: AnyWeights, images: Images, output: Output, limit: Limit = 128, _debug: Debug = False) -> None:
    """Draw what a ViT looks at: the paper's figures 6, 7 and 11."""
    from jobs.commands import analyze, stored_runs

    stored_runs.refuse_as_weights(weights, "analyze")
    analyze.analyze(weights, images, output, limit)


@commands.command()
def evaluate(
    weights: AnyWeights,
    words: SetsAndOverrides,
    protocol: ProtocolNames = None,
    output: DocumentFolder = None,
    _debug: Debug = False,
) -> None:
    """Judge weights on sets: accuracies with intervals, and a document of what they trace back to."""
    from jobs.commands import evaluate

    evaluate.evaluate(weights, words, protocol or [], output)
