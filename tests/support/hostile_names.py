"""Names that an attacker puts into buckets, records, manifests and claims to write outside the folder of a run."""

HOSTILE_NAMES = [
    "..",
    ".",
    "",
    "../outside",
    "a/../../outside",
    "a/..",
    "./a",
    "a//b",
    "//abs",
    "/abs",
    "a/",
    "a\0b",
    "a/" + 256 * "b",
    128 * "é",
    "a\ud800",
    None,
    7,
    ["a"],
]
