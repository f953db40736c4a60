"""The releases of torch and DeepSpeed that `make versions` has compared with plain torch."""

from collections.abc import Mapping

# Every pair computes the bits of plain torch at every ZeRO stage (docs/design/engine-check.md has the table).
# pyproject.toml has the ranges, constraints.txt the pair that most tests run with.
TESTED = {"torch": ("2.11.0", "2.13.0", "2.15.0"), "deepspeed": ("0.19.8",)}


def untested_pair(versions: Mapping[str, str]) -> str:
    """Describe a pair of torch and DeepSpeed releases that were not tested together; "" if they were."""
    pair = {name: versions[name].partition("+")[0] for name in TESTED}  # without the kind of build, such as "+cpu"
    if all(pair[name] in TESTED[name] for name in TESTED):
        return ""
    return (
        f"torch {pair['torch']} and DeepSpeed {pair['deepspeed']} were not tested together; tested: torch "
        f"{', '.join(TESTED['torch'])} with DeepSpeed {', '.join(TESTED['deepspeed'])} (docs/design/engine-check.md)"
    )
