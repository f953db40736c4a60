"""Write docs/configuration.md, the reference of all recipe keys, from the config dataclasses.

    python -m benchmarks.configuration_page > docs/configuration.md

1. `keys_of` walks a dataclass and its sections; the default and type of a key come from the field.
2. `meanings` takes the meaning of a key from the comment after its field in the source, or from the lines above it.
3. The effect of a change on resume is the field's tag in RESUME, as in `pipeline.config.tagged`.
4. `configuration_page` writes tables of keys under headings.

    clip: float = 1.0  # largest global gradient norm; 0 is off
    →  | `optim.clip` | `1.0` | number | forbid | largest global gradient norm; 0 is off |
"""

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from jobs.__main__ import KINDS
from jobs.cluster_config import ClusterConfig
from jobs.extras.monitor.trackers_config import TrackersConfig
from jobs.extras.studies.expand import SweepConfig
from jobs.kinds import load_kinds
from jobs.resolved_recipe import StageKind
from models import configs
from pipeline.config import ConfigDataclass, is_named, is_number_or_section, ordered_fields, resume_tags, section_kind
from pipeline.training_config import TrainConfig
from pipeline.values import BYTES, PLURALS, flow_yaml, unit_of

Kind: TypeAlias = type[ConfigDataclass]

TYPES: dict[object, str] = {
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    str: "string",
    dict: "section",
    Any: "any value",
}
# Recipes must set these keys of a model without initial weights, although the classes have defaults for notebooks.
REQUIRED: dict[Kind, tuple[str, ...]] = {
    config: ("image_size", "classes") for config in configs.CONFIGS.values() if config is not configs.MaskedConfig
}
REQUIRED[configs.MaskedConfig] = ("image_size",)
TOOL_COMMENTS = re.compile(r"#\s*(type: ignore|noqa)\S*")  # comments for tools, to be ignored
HEADER = ["| key | default | values | on resume | meaning |", "|---|---|---|---|---|"]


@dataclass(frozen=True)
class Key:
    """One row of a table."""

    name: str  # dotted name inside the stage's section
    default: str
    values: str  # type or allowed values, and the unit
    resume: str  # resume tag: free, warn or forbid
    meaning: str


@dataclass(frozen=True)
class Section:
    """One table: the keys of a dataclass, with one row for each nested section."""

    name: str  # dotted name; "" for the stage itself
    meaning: str
    keys: list[Key]


# ------------------------------------------------------------------------------------------------ comments


def meanings(kind: Kind) -> dict[str, str]:
    """Return {field: explaining comment}, including inherited fields; "" without a comment."""
    texts: dict[str, str] = {}
    # Parents first, so that comments of a class replace inherited ones.
    for parent in reversed(kind.__mro__):
        # A composed config declares no fields and has no source.
        if not dataclasses.is_dataclass(parent) or not vars(parent).get("__annotations__"):
            continue
        for name, text in comments_of(parent).items():
            if text or name not in texts:  # a field that only changes a default keeps its meaning
                texts[name] = text
    return texts


def comments_of(kind: Kind) -> dict[str, str]:
    """Return the comments of the fields declared by the class itself."""
    # Read the source, because Python discards comments; dedent it, because an indented class would not parse.
    source = textwrap.dedent(inspect.getsource(kind))
    beside: dict[int, str] = {}  # line number → comment after code
    above: dict[int, str] = {}  # line number → comment on a separate line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = TOOL_COMMENTS.sub("", token.string).strip("# ")
        if token.type == tokenize.COMMENT and text:
            has_own_line = token.line.lstrip().startswith("#")
            (above if has_own_line else beside)[token.start[0]] = text

    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.end_lineno is None:
            continue
        lines_above: list[str] = []
        line = node.lineno - 1
        # Go up until a line without a comment: a blank line or code ends the comment of this field.
        while line in above:
            lines_above.insert(0, above[line])
            line -= 1
        parts = [" ".join(lines_above), beside.get(node.end_lineno, "")]
        # The values of a Literal may be on separate lines, each followed by a comment.
        for value in ast.walk(node.annotation):
            if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
                continue
            # A comment on the field's last line always belongs to the field.
            if value.lineno in beside and value.lineno != node.end_lineno:
                parts.append(f"`{value.value}`: {beside[value.lineno]}")
        text = "; ".join(filter(None, parts))
        texts[node.target.id] = text.replace("None:", "`null`:")  # a recipe is YAML
    return texts


# ------------------------------------------------------------------------------------------------ keys


def sections_of(
    kind: Kind, defaults: ConfigDataclass | None = None, prefix: str = "", outer: str = "forbid"
) -> Iterator[Section]:
    """Yield the sections of a config, beginning with the config itself.

    `defaults` are a stage's defaults, if it has any; `outer` is the resume tag for a class without tags.
    """
    texts = meanings(kind)
    hints = get_type_hints(kind)
    tag_of_field = resume_tags(kind)
    keys = []
    inside: list[Iterator[Section]] = []
    for field in ordered_fields(kind):
        name = prefix + field.name
        hint = hints[field.name]
        resume = tag_of_field.get(field.name, outer)
        default: object = field.default
        if defaults is not None:
            default = getattr(defaults, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        written = "required" if default == "???" or field.name in REQUIRED.get(kind, ()) else f"`{flow_yaml(default)}`"
        inner = section_kind(hint)
        if inner is None:
            values = type_text(hint, configs.CHOICES.get(field.name))
            unit = unit_of(field.name)
            if unit is not None:
                values = f"{values}, {unit.name}"
            if isinstance(default, int) and unit is not None and unit.factors is BYTES:
                written = f"`{default >> 30}GiB`"
        elif is_number_or_section(hint):
            values = "whole number, or section"
            inside.append(sections_of(inner, None, f"{name}.", resume))
        elif is_named(hint):
            values = "sections by name"
            inside.append(sections_of(inner, None, f"{name}.<name>.", resume))
        else:
            assert dataclasses.is_dataclass(default) and not isinstance(default, type)
            written = "see below"
            values = "section"
            # Inner tables follow this one, so that a section's row precedes its keys.
            inside.append(sections_of(inner, default, f"{name}.", resume))
        keys.append(Key(name, written, values, resume, texts[field.name]))

    # Use the first paragraph of the class's docstring, unless dataclasses generated it.
    written_in = TrainConfig if issubclass(kind, TrainConfig) else kind  # a composed config has no source
    definition = ast.parse(textwrap.dedent(inspect.getsource(written_in))).body[0]
    assert isinstance(definition, ast.ClassDef)
    meaning = (ast.get_docstring(definition) or "").partition("\n\n")[0]
    yield Section(prefix.rstrip("."), " ".join(meaning.split()), keys)
    for sections in inside:
        yield from sections


def type_text(hint: object, choices: tuple[str, ...] | None = None) -> str:
    """Return a type in words: "number or `null`", "`a`, `b` or `c`".

    `choices` are the values of a string field that its class checks itself, as models do.
    """
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, UnionType):
        named = [type_text(argument, choices) for argument in arguments if argument is not NoneType]
        return ", or ".join([*named, "`null`"])
    if origin is Literal:
        choices = arguments
    if choices is not None and (origin is Literal or hint is str):
        *others, last = [f"`{choice}`" for choice in choices]
        return f"{', '.join(others)} or {last}" if others else last
    if origin is list or (origin is tuple and Ellipsis in arguments):
        return f"list of {PLURALS[arguments[0]]}"
    if origin is tuple:
        return f"list of {len(arguments)} {PLURALS[arguments[0]]}"
    return TYPES[origin or hint]


# ------------------------------------------------------------------------------------------------ the page

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m benchmarks.configuration_page > docs/configuration.md`; change the fields' comments. -->

A recipe is a YAML file that describes a campaign. This page lists all its keys. A recipe contains only the keys that
differ from the defaults, and any key can be overridden on the command line:

    python -m jobs run recipe.yaml pretrain.optim.lr=1e-3 cluster.workers=8

These are the keys that most people change. Keys of a stage are written without the stage's name.
"""

# Rows of the first table; the text after `|` replaces the field's own comment.
MOST_CHANGED = """\
run | the run directory: a folder that all nodes share, or s3://bucket/name
cluster.workers | processes that train together, with one GPU or some cores each
cluster.gpus_per_worker | 1 on a machine with GPUs; 0: workers compute on the CPU
cluster.backend | processes: only this machine; ray: also a cluster
data.train | training images: the folder of a set made by `pack` or `index`, or "@stage/set"
data.evaluate | images for measuring accuracy, in the same form
data.processes | decoding processes for each worker; 0: the training process decodes
data.augment.crop | how a training image is cropped
data.augment.min_area | smallest share of an image that a crop covers: 0.05 for millions of images, 0.3+ for few
data.augment.flip | false if left and right matter, as for digits
data.cache.limit_bytes | size of a node's cache of shards from an object store
model.name | size and patch: `mu/8`, `Ti/16`, `S/16`, `B/16`, `L/16`, `H/14`
model.image_size | side of the model's input images, a multiple of the patch
model.classes | number of classes in the data
init | initial weights: a folder, or "@stage"; `null`: random
steps | optimizer steps
passes | instead of steps: how often each image is seen
batch_size | images in a step, over all workers
micro_batch | images that a worker processes at once; reduce it if memory does not suffice
optim.lr | peak learning rate; 8e-4 is for a batch_size of 4096: use less for smaller batches
optim.weight_decay | strength of weight decay
optim.schedule.warmup_steps | steps of warm-up; at most the stage's steps, a tenth of them is usual
loss | `softmax`: one label for each image; `sigmoid`: several
precision | `fp32` on a CPU, `bf16` on a GPU
save_every | steps between checkpoints; a crash loses the work since the last checkpoint
"""

STRUCTURE = """\
**Units.** Values accept units: `80GB` or `80GiB` for keys in bytes or GiB, `90s`, `30min` or `2h` for keys in seconds,
`10k` or `1e4` for whole numbers.

**Models.** `model: S/16` is short for `model: {name: S/16}`. On the command line, `pretrain.model=S/16` and
`'pretrain.model={name: S/16}'` keep only image_size and classes of the recipe's model. `pretrain.model.name=S/16` is
refused if the recipe sets widths of its own.

**Inputs.** Keys that name an input (`init`, `data.train`, `data.evaluate`, …) take a path or another stage of the
recipe: `@stage` for its weights, `@stage/name` for a set of shards made by a `pack` stage.

**Environment.** `${oc.env:NAME}` is replaced when the recipe is read. Paths and other text in the records of a run and
in its checkpoints keep the variable in place of its value, with a digest of the value; numbers and single words are
recorded as they are ([why](design/variables.md)). Stage keys cover the values. Logs, pages and a submitted recipe may
show a value. A variable whose name or value looks like a secret is refused.

**Sweeps.** Any stage's section can hold a `sweep`, which turns it into several stages ([studies.md](studies.md)).

The top level of a recipe holds these keys:

| key | default | values | meaning |
|---|---|---|---|
| `run` | `runs/<the recipe's name>` | path | the run directory, on a disk that all nodes share |
| `cluster` | see below | section | number and resources of the workers that run the stages |
| `trackers` | see below | section | W&B and MLflow, each used if configured |
| `budget` | `null` | number, or `null` | largest total of exaFLOPs for all trained stages ([studies.md](studies.md)) |
| any other | none | section | a stage: its name is the key, and so is its kind unless it sets `kind: …` |

In the tables below, keys of a stage begin in the stage's section: `optim.lr`. `<name>` stands for a name that you
choose.

The column "on resume" tells what happens if a key changes before an unfinished stage resumes:

- **free**: the stage resumes with the new value.
- **warn**: the stage resumes with the new value and logs a warning; numbers before and after may not be comparable.
- **forbid**: the stage refuses to resume and shows the difference, because the training would not be the same. Undo the
  change, or restart the stage with `--fresh`. Only these keys determine whether a finished stage is skipped.
"""

MODEL_TEXT = """\
A model's section needs a `name`, an `image_size` in pixels and the number of `classes`. The name sets the
architecture's fields (width, depth, patch and so on). The section can also set any field of the model's family. A stage
with initial weights (`init`) can omit all fields and contains only its changes to their model.

    model: {name: B/16, image_size: 224, classes: 1000, pool: gap}

No field of a model can change on resume."""


def all_keys(kind: Kind, defaults: ConfigDataclass | None = None) -> list[Key]:
    """Return every key of a config, including those of its sections."""
    keys = []
    for section in sections_of(kind, defaults):
        keys += section.keys
    return keys


def table(keys: list[Key]) -> list[str]:
    """Return the lines of a table of keys, and a blank line."""
    lines = list(HEADER)
    for key in keys:
        cells = (f"`{key.name}`", key.default, key.values, key.resume, key.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def most_changed() -> list[str]:
    """Return the table of frequently changed keys, with the defaults of a pretraining stage."""
    pretrain = load_kinds(KINDS)["pretrain"]
    keys = {key.name: key for key in all_keys(pretrain.config, pretrain.defaults)}
    for key in all_keys(ClusterConfig):
        keys[f"cluster.{key.name}"] = key
    keys["run"] = Key("run", "`runs/<the recipe's name>`", "path", "", "")
    keys["model.name"] = Key("model.name", "required", "string", "", "")
    keys["model.image_size"] = Key("model.image_size", "required", "whole number", "", "")
    keys["model.classes"] = Key("model.classes", "required", "whole number", "", "")
    keys["data.train"] = dataclasses.replace(keys["data.train"], default="required", values="string")
    units = {"model.image_size": "pixels", "save_every": "steps", "data.augment.min_area": "0 to 1"}
    lines = ["| key | default | values, unit | meaning |", "|---|---|---|---|"]
    for row in MOST_CHANGED.splitlines():
        name, _, meaning = row.partition(" | ")
        values = ", ".join(filter(None, [keys[name].values, units.get(name)]))
        lines.append(f"| `{name}` | {keys[name].default} | {values} | {meaning} |")
    return [*lines, ""]


def configuration_page() -> str:
    """Return the text of docs/configuration.md: the campaign's own sections, every kind of stage, and `model`."""
    lines = [INTRODUCTION.rstrip(), "", *most_changed(), STRUCTURE.rstrip(), ""]
    shared = {"`cluster`": ClusterConfig, "`trackers`": TrackersConfig, "`sweep`": SweepConfig}
    headed: list[tuple[str, Kind, ConfigDataclass | None]] = []
    for name, shared_kind in shared.items():
        headed.append((f"## {name}", shared_kind, None))
    kinds = list(load_kinds(KINDS).values())
    for stage_kind in kinds:
        headed.append((f"## Stage `{stage_kind.name}`", stage_kind.config, stage_kind.defaults))
    shown: dict[Kind, StageKind] = {}
    for stage_kind in reversed(kinds):
        shown[stage_kind.config] = stage_kind  # the first kind of stage with this config
    for heading, kind, defaults in headed:
        lines += [heading, ""]
        first = shown.get(kind)
        # If two kinds of stages share a class, list only the different defaults of the second one.
        if first is not None and first.defaults is not defaults:
            before = all_keys(kind, first.defaults)
            changed = []
            for key, old in zip(all_keys(kind, defaults), before, strict=True):
                if key.default != old.default:
                    changed.append(key)
            lines += [f"It has the keys of `{first.name}`, with other defaults for these:", "", *table(changed)]
            continue
        for section in sections_of(kind, defaults):
            if section.name:
                lines += [f"### `{section.name}`", ""]
            if section.meaning:
                lines += [section.meaning, ""]
            lines += table(section.keys)

    # Models: names, sizes, and the fields of each family.
    hybrids = ", ".join(f"`{stem}+B/{stride}`" for stem, stride in configs.STEMS)
    depths = ", ".join(f"`BiT-R{depth}x1`" for depth in configs.UNITS)
    lines += [
        "## The section `model`",
        "",
        *MODEL_TEXT.splitlines(),
        "",
        "### Names",
        "",
        "- `B/16`: a Vision Transformer of a size from the table below, with patches of 16 × 16 pixels (family `vit`).",
        f"- {hybrids}: a ResNet followed by a Vision Transformer of any size (family `vit`).",
        f"- {depths}: a ResNet; `x3` is three times as wide (family `bit`).",
        "- `Axial-B/32`: attention along rows, then columns, of any size (family `axial`).",
        "- `Masked-B/16`: a Vision Transformer for `objective: masked`, of any size (family `masked`).",
        "",
        "| size | width | depth | mlp | heads |",
        "|---|---|---|---|---|",
    ]
    for size, (width, depth, mlp, heads) in configs.SIZES.items():
        lines.append(f"| `{size}` | {width} | {depth} | {mlp} | {heads} |")
    lines.append("")
    vit_keys = all_keys(configs.ViTConfig)
    for family, model_kind in configs.CONFIGS.items():
        assert dataclasses.is_dataclass(model_kind)
        keys = all_keys(model_kind)
        lines += [f"### Family `{family}`", ""]
        if model_kind is not configs.ViTConfig and issubclass(model_kind, configs.ViTConfig):
            keys = [key for key in keys if key not in vit_keys]
            lines += ["It has the fields of `vit`; these are new or have other defaults:", ""]
        lines += table(keys)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(configuration_page(), end="")
