"""Count how many of timm's pretrained Vision Transformers can be imported, and write the table of docs/imports.md.

    python -m benchmarks.timm_imports [--width native] [--seed 0]

Every architecture gets random weights; nothing is downloaded. By default, names, heads and epsilons are compared at
their own width, and logits in a small model of the same architecture, which takes two minutes of one core. With
`--width native`, logits are compared at the architecture's own width and size, with one or two blocks: about an hour.
"""

import argparse
import re
from dataclasses import dataclass, field

from tests.support.timm_models import architectures, compare, family_of

FAMILIES = (  # name, pattern of timm's architectures; the first match counts
    ("DINOv3, LingBot", r"dinov3|lingbot"),
    ("DINOv2, TIPSv2", r"dinov2|tipsv2"),
    ("EVA-02", r"eva02"),
    ("EVA", r"eva_"),
    ("Perception Encoder", r"vit_pe_"),
    ("CLIP", r"_clip_"),
    ("SigLIP", r"^vit_.*siglip"),
    ("AIMv2", r"aimv2"),
    ("RADIO, InternViT", r"^vit_.*(radio|intern)"),
    ("RoPE-ViT", r"_rope_(ape_|mixed_)?(ape_)?224"),
    ("SBB: registers, LayerScale, rotary positions", r"_reg\d_|_reg\d|rope_reg"),
    ("DeiT-3", r"deit3"),
    ("DeiT", r"deit_"),
    ("BEiT-3", r"beit3"),
    ("BEiT, BEiTv2", r"beit"),
    ("hybrids", r"_r50_|_r26_|_r_s16|_mci_"),
    ("Sapiens 2", r"sapiens"),
    ("NaFlexViT", r"naflex"),
    ("FlexiViT", r"flexivit"),
    ("AugReg and others of the paper's kind", r""),
)


@dataclass
class Family:
    """The counts in one row of the table."""

    architectures: int = 0
    imported_architectures: int = 0
    weights: int = 0
    imported_weights: int = 0
    largest: float = 0.0  # difference of logits or features
    reasons: dict[str, int] = field(default_factory=dict)  # of refusals, with the number of weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", choices=("small", "native"), default="small")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    families = {name: Family() for name, _ in FAMILIES}
    refused = []
    for architecture, weights in architectures().items():
        name = next(name for name, pattern in FAMILIES if re.search(pattern, architecture))
        family = families[name]
        family.architectures += 1
        family.weights += weights
        outcome = compare(architecture, options.seed, small=options.width == "small")
        if outcome.reason:
            reason = outcome.reason.removeprefix("this timm model has ").removesuffix(", which is not supported")
            family.reasons[reason] = family.reasons.get(reason, 0) + weights
            refused.append(f"{architecture} ({family_of(architecture)}, {weights}): {reason}")
            continue
        family.imported_architectures += 1
        family.imported_weights += weights
        family.largest = max(family.largest, outcome.logits, outcome.features, outcome.other_size)
    print("| family | architectures | pretrained weights | largest difference | not imported |\n|---|--:|--:|--:|---|")
    for name, family in families.items():
        reasons = "; ".join(f"{reason}: {count}" for reason, count in family.reasons.items())
        largest = f"{family.largest:.0e}" if family.imported_weights else ""
        print(
            f"| {name} | {family.imported_architectures} of {family.architectures} "
            f"| {family.imported_weights} of {family.weights} | {largest} | {reasons} |"
        )
    print(f"\nimported: {sum(family.imported_weights for family in families.values())}", end=" ")
    print(f"of {sum(family.weights for family in families.values())} pretrained weights\n")
    print("\n".join(refused))


if __name__ == "__main__":
    main()
