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
from jobs.extras.studies.expand import SweepConfig
from jobs.kinds import load_kinds
from jobs.resolved_recipe import StageKind
from jobs.trackers_config import TrackersConfig
from models import configs
from pipeline.config import ConfigDataclass, is_named, is_number_or_section, ordered_fields, resume_tags, section_kind
from pipeline.training_config import TrainConfig
from pipeline.values import BYTES, PLURALS, flow_yaml, unit_of

Kind: TypeAlias = type[ConfigDataclass]

TYPES: dict[object, str] = {
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    str: "text",
    dict: "section",
    Any: "any value",
}
# A recipe names these of every model that starts from nothing, although the classes have defaults for a notebook.
REQUIRED: dict[Kind, tuple[str, ...]] = {
    config: ("image_size", "classes") for config in configs.CONFIGS.values() if config is not configs.MaskedConfig
}
REQUIRED[configs.MaskedConfig] = ("image_size",)
TOOL_COMMENTS = re.compile(r"#\s*(type: ignore|noqa)\S*")  # which are not for people
HEADER = ["| key | default | values | on resume | meaning |", "|---|---|---|---|---|"]


@dataclass(frozen=True)
class Key:
    """One row of a table."""

    name: str  # dotted, from the stage's section on
    default: str
    values: str  # its type, or what is allowed, and its unit
    resume: str  # free, warn or forbid
    meaning: str


@dataclass(frozen=True)
class Section:
    """One table: the keys of a dataclass, with one row for each nested section."""

    name: str  # dotted; "" for the stage itself
    meaning: str
    keys: list[Key]


# ------------------------------------------------------------------------------------------------ comments


def meanings(kind: Kind) -> dict[str, str]:
    """Return {field: the comment that explains it}, inherited fields included; "" where there is none."""
    texts: dict[str, str] = {}
    # Parents first, so that what a class says itself replaces what it inherits.
    for parent in reversed(kind.__mro__):
        # A composed config declares nothing itself, and has no source.
        if not dataclasses.is_dataclass(parent) or not vars(parent).get("__annotations__"):
            continue
        for name, text in comments_of(parent).items():
            if text or name not in texts:  # a field that only changes a default keeps its meaning
                texts[name] = text
    return texts


def comments_of(kind: Kind) -> dict[str, str]:
    """Return the comments of the fields that the class itself declares."""
    # From the source, because Python forgets comments; an indented class alone would not parse.
    source = textwrap.dedent(inspect.getsource(kind))
    beside: dict[int, str] = {}  # line → comment beside code
    above: dict[int, str] = {}  # line → comment on a line of its own
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
        # Upwards until a line that is no comment: a blank line or code ends what belongs to this field.
        while line in above:
            lines_above.insert(0, above[line])
            line -= 1
        parts = [" ".join(lines_above), beside.get(node.end_lineno, "")]
        # The values of a Literal may stand on a line each, with a comment beside them.
        for value in ast.walk(node.annotation):
            if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
                continue
            # A comment on the field's last line is of the field, whatever else stands on that line.
            if value.lineno in beside and value.lineno != node.end_lineno:
                parts.append(f"`{value.value}`: {beside[value.lineno]}")
        text = "; ".join(filter(None, parts))
        texts[node.target.id] = text.replace("None:", "`null`:")  # a recipe is YAML
    return texts


# ------------------------------------------------------------------------------------------------ keys


def sections_of(
    kind: Kind, defaults: ConfigDataclass | None = None, prefix: str = "", outer: str = "forbid"
) -> Iterator[Section]:
    """Iterate the sections of a config, itself first.

    `defaults` are a stage's own where it has some; `outer` is the resume tag of a class that has none.
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
            # Inner tables come after this one: a reader meets the section's row before its keys.
            inside.append(sections_of(inner, default, f"{name}.", resume))
        keys.append(Key(name, written, values, resume, texts[field.name]))

    # The first paragraph of what the class says of itself; dataclasses write a docstring where there is none.
    written_in = TrainConfig if issubclass(kind, TrainConfig) else kind  # a composed config has no source
    definition = ast.parse(textwrap.dedent(inspect.getsource(written_in))).body[0]
    assert isinstance(definition, ast.ClassDef)
    meaning = (ast.get_docstring(definition) or "").partition("\n\n")[0]
    yield Section(prefix.rstrip("."), " ".join(meaning.split()), keys)
    for sections in inside:
        yield from sections


def type_text(hint: object, choices: tuple[str, ...] | None = None) -> str:
    """Return a type in words: "number or `null`", "`a`, `b` or `c`".

    `choices` are those of a plain text which its own class checks, as models do.
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

A recipe is a YAML file; a key can be typed behind a command too, as `pretrain.optim.lr=1e-3`. These are the keys that
people change, those of a stage without the stage's name; all others follow below.
"""

# Rows of the first table; what stands behind `|` is said instead of the field's own comment.
MOST_CHANGED = """\
run | where everything is written: a folder that all nodes share, or s3://bucket/name
cluster.workers | processes that train together, a GPU each or some cores each
cluster.gpus_per_worker | 1 on a machine with GPUs; 0: workers compute on the CPU
cluster.backend | processes: this machine alone; ray: also a cluster
data.train | the images: the folder of a set that `pack` or `index` has made, or "@stage/set"
data.evaluate | the images that accuracy is measured on, likewise
data.processes | decoding processes for each worker; 0: the training process decodes
data.augment.crop | how a training image is cut out
data.augment.min_area | the least share of an image that a crop covers: 0.05 for millions of images, 0.3 or more for few
data.augment.flip | false where left and right differ, as for digits
data.cache.limit_bytes | what a node keeps of shards from an object store
model.name | size and patch: `mu/8`, `Ti/16`, `S/16`, `B/16`, `L/16`, `H/14`
model.image_size | of the images that the model sees, a multiple of the patch
model.classes | as many as the data has
init | weights to start from: a folder, or "@stage"; `null`: random
steps | optimizer steps
passes | in the place of steps: how often each image is seen
batch_size | images of a step, of all workers together
micro_batch | images that a worker has in memory at once; make it smaller where memory does not suffice
optim.lr | the largest learning rate; 8e-4 is for a batch_size of 4096: take less for less
optim.weight_decay | how strongly weights are drawn to 0
optim.schedule.warmup_steps | steps over which the rate rises; at most as many as the stage has, a tenth is usual
loss | `softmax`: one label for each image; `sigmoid`: several
precision | `fp32` on a CPU, `bf16` on a GPU
save_every | between checkpoints; what was trained since the last one is lost when the machine dies
"""

STRUCTURE = """\
Units may be written out: `80GB` or `80GiB` where a key is in bytes or GiB, `90s`, `30min` or `2h` where it is in
seconds, `10k` or `1e4` for a whole number. `model: S/16` is short for `model: {name: S/16}`; typed behind a command,
`pretrain.model=S/16`, or `'pretrain.model={name: S/16}'`, keeps image_size and classes of the recipe's model, and
nothing else of it; `pretrain.model.name=S/16` is refused where the recipe has widths of its own.

A recipe's top level holds these keys:

| key | default | values | meaning |
|---|---|---|---|
| `run` | `runs/<the recipe's name>` | path | the run directory, on a disk that all nodes share |
| `cluster` | see below | section | how many workers run the stages, and on what |
| `trackers` | see below | section | W&B and MLflow, each used where it is told where |
| `budget` | `null` | number, or `null` | exaFLOPs that all trained stages may take together (scaling.md) |
| any other | none | section | a stage: its name is the key, its kind is the key too unless it says `kind: …` |

A recipe writes only what differs from the defaults. The same keys can be typed after a command, with dots between the
levels: `python -m jobs run recipe.yaml pretrain.optim.lr=1e-3 cluster.workers=8`. Below, the keys of a stage are
written from the stage's section on: `optim.lr`. `<name>` stands for a name that you choose.

The column "on resume" says what happens when a key is changed and a half-done stage is run again:

- **free**: the stage goes on with the new value.
- **warn**: the stage goes on with the new value and says so; numbers before and after may not compare.
- **forbid**: the stage refuses to go on and shows the difference, because it would not be the same training any more.
  Undo the change, or start the stage over with `--fresh`. Only these keys decide whether a finished stage is skipped.

Keys that name an input (`init`, `data.train`, `data.evaluate`, …) take a path or another stage of the recipe: `@stage`
for its weights, `@stage/name` for a set of shards that a `pack` stage makes.

Any stage's section may hold a `sweep`, which makes many stages of it ([sweeps.md](sweeps.md)).
"""

MODEL_TEXT = """\
A model's section has a `name`, an `image_size` in pixels and the number of `classes`: all three are required. The name
sets the fields that make the architecture (width, depth, patch and so on); the section may set any field of the model's
family besides. A stage that starts from other weights (`init`) may leave out all of them, and writes only what it
changes of their model.

    model: {name: B/16, image_size: 224, classes: 1000, pool: gap}

A change of any of these fields is forbidden on resume."""


def all_keys(kind: Kind, defaults: ConfigDataclass | None = None) -> list[Key]:
    """Return every key of a config, those of its sections included."""
    keys = []
    for section in sections_of(kind, defaults):
        keys += section.keys
    return keys


def table(keys: list[Key]) -> list[str]:
    """Return the rows of keys under a header, and a blank line."""
    lines = list(HEADER)
    for key in keys:
        cells = (f"`{key.name}`", key.default, key.values, key.resume, key.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def most_changed() -> list[str]:
    """Return the table of the keys that people change, with the defaults of a pretraining."""
    pretrain = load_kinds(KINDS)["pretrain"]
    keys = {key.name: key for key in all_keys(pretrain.config, pretrain.defaults)}
    for key in all_keys(ClusterConfig):
        keys[f"cluster.{key.name}"] = key
    keys["run"] = Key("run", "`runs/<the recipe's name>`", "path", "", "")
    keys["model.name"] = Key("model.name", "required", "text", "", "")
    keys["model.image_size"] = Key("model.image_size", "required", "whole number", "", "")
    keys["model.classes"] = Key("model.classes", "required", "whole number", "", "")
    keys["data.train"] = dataclasses.replace(keys["data.train"], default="required", values="text")
    units = {"model.image_size": "pixels", "save_every": "steps", "data.augment.min_area": "0 to 1"}
    lines = ["| key | default | values, unit | meaning |", "|---|---|---|---|"]
    for row in MOST_CHANGED.splitlines():
        name, _, meaning = row.partition(" | ")
        values = ", ".join(filter(None, [keys[name].values, units.get(name)]))
        lines.append(f"| `{name}` | {keys[name].default} | {values} | {meaning} |")
    return [*lines, ""]


def configuration_page() -> str:
    """Return docs/configuration.md as it should be: the campaign's own sections, every kind of stage, `model`."""
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
        shown[stage_kind.config] = stage_kind  # the first of those with this config
    for heading, kind, defaults in headed:
        lines += [heading, ""]
        first = shown.get(kind)
        # Two kinds of stages may share a class; a second table of the same keys would hide the defaults that differ.
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

    # Models: their names, their sizes, and the fields of each family.
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
        f"- {hybrids}: a ResNet before the transformer, of any size (family `vit`).",
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
            lines += ["It has the fields of `vit`, but for these:", ""]
        lines += table(keys)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(configuration_page(), end="")
