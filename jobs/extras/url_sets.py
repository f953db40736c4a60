"""Let a stage name a data set by the URL of its tars: a stage that indexes the tars is added to the recipe.

    pretrain: {data: {train: "hf://datasets/me/photos/train/*.tar"}}

    →   pretrain-index:
          kind: pack
          sets: {train: {source: shards, path: "hf://datasets/me/photos/train/*.tar"}}
          workers: 8
        pretrain: {data: {train: "@pretrain-index/train"}}

The tars are listed and indexed once for a campaign, and `hf://` is read at the commit of that moment. The sets of one
section share a class numbering. A URL that several sections name is indexed once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobs.resolved_recipe import Kinds, Reads, Sections, StageSection
from pipeline.config import require

PACK = "pack"  # the kind of the added stages
AT_ONCE = 8  # tars that are downloaded and indexed in parallel


def with_indexed_urls(sections: Sections, kinds: Kinds) -> Sections:
    """Return the sections with each URL replaced with a reference, and with added stages that index the URLs.

    Raises ConfigError if the name of an added stage is already in use.
    """
    added: dict[str, dict[str, Any]] = {}  # sets by the stage that indexes them
    references: dict[tuple[str, bool], str] = {}  # (URL, ignores labels) → reference
    result: dict[str, StageSection] = {}
    for name, section in sections.items():
        values = section.values
        kind = kinds.get(str(values.get("kind", name))) if isinstance(values, Mapping) else None
        if kind is None or kind.name == PACK:
            result[name] = section
            continue
        stage = f"{section.source}-index"
        unlabelled = values.get("objective") == "masked"

        def replaced(field: str, url: str, stage: str = stage, unlabelled: bool = unlabelled) -> str:
            if (url, unlabelled) not in references:
                require(
                    stage not in sections,
                    f"{field} is a URL, which a stage named {stage} would index, but the recipe already has a stage "
                    "with this name\n"
                    "  rename the stage",
                )
                sets = added.setdefault(stage, {})
                set_name = field.removeprefix("data.").replace(".", "-")
                described: dict[str, Any] = {"source": "shards", "path": url}
                if unlabelled:
                    described["unlabelled"] = True
                # Runs of a sweep may name different URLs in the same field.
                unused = set_name
                while unused in sets:
                    unused = f"{set_name}-{len(sets)}"
                sets[unused] = described
                references[url, unlabelled] = f"@{stage}/{unused}"
            return references[url, unlabelled]

        for pattern, reads in kind.inputs.items():
            if reads is Reads.SET:
                values = with_urls_replaced(values, pattern.split("."), replaced)
        result[name] = StageSection(values, section.source)
    for stage, sets in added.items():
        result[stage] = StageSection({"kind": PACK, "sets": sets, "workers": AT_ONCE}, stage)
    return result


def with_urls_replaced(
    values: object, parts: Sequence[str], replaced: Callable[[str, str], str], above: str = ""
) -> object:
    """Return a section in which each URL in the fields that match a pattern is replaced with `replaced(field, URL)`."""
    if not parts:
        return replaced(above, values) if isinstance(values, str) and "://" in values else values
    if not isinstance(values, Mapping):
        return values
    result = dict(values)
    for name in values if parts[0] == "*" else [parts[0]]:
        if name in values:
            result[name] = with_urls_replaced(values[name], parts[1:], replaced, f"{above}.{name}".lstrip("."))
    return result
