"""Measure the cost of indexing against another commit: CPU time per sample, and memory, for 200 tars of 1,000 samples.

    git worktree add --detach /tmp/before 186a5c44
    python -m benchmarks.indexing --before /tmp/before

Each checkout indexes the same tars in a separate process, in turn. The cost per sample is the CPU time of that process
without the imports, as the minimum over all rounds; memory is the peak resident set size.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from data.extras.sources.samples import digits
from tests.support.tars import tar_of

ROOT = Path(__file__).parents[1]
SHARDS = 200
SAMPLES = 1000  # per shard
INDEXING = """
import json, resource, sys
from data.extras.shards.indexing import build_index

def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

start = cpu_s()
index = build_index(sys.argv[1], output=sys.argv[2], name="set", classes=10)
mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"us": 1e6 * (cpu_s() - start) / index.samples, "mib": mib, "digest": index.digest}))
"""


def write_tars(folder: Path) -> None:
    """Write the tars: handwritten digits of 32 × 32 pixels with class ids; the keys repeat from tar to tar."""
    images = [sample for sample in digits(True) if isinstance(sample.image, bytes)]
    members = []
    for number in range(SAMPLES):
        sample = images[number % len(images)]
        assert isinstance(sample.image, bytes) and sample.labels
        members += [(f"s{number:06}.jpg", sample.image), (f"s{number:06}.cls", str(sample.labels[0]).encode())]
    content = tar_of(members)
    for shard in range(SHARDS):
        (folder / f"set-{shard:06}.tar").write_bytes(content)


def measure(tree: Path, tars: Path) -> dict[str, float | str]:
    """Index the tars with a checkout's code; return CPU µs per sample, peak memory in MiB, and the digest."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-c", INDEXING, str(tars), output]
        answer = subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True, capture_output=True, text=True
        )
    measured: dict[str, float | str] = json.loads(answer.stdout)
    return measured


def main() -> None:
    """Print the cost in each round, then the minimum over all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="the tree of another commit")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    trees = {"after": ROOT}
    if arguments.before:
        trees = {"before": arguments.before.resolve(), **trees}
    rounds: dict[str, list[dict[str, float | str]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        write_tars(Path(folder))
        for number in range(arguments.rounds):
            for name, tree in trees.items():
                measured = measure(tree, Path(folder))
                rounds[name].append(measured)
                print(f"round {number} {name}: {measured['us']:.1f} µs of CPU a sample, {measured['mib']:.1f} MiB")
    for name, results in rounds.items():
        least = [min(float(result[key]) for result in results) for key in ("us", "mib")]
        print(f"{name}: {least[0]:.1f} µs of CPU a sample, {least[1]:.1f} MiB, digest {results[0]['digest']}")


if __name__ == "__main__":
    main()
