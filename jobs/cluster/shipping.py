"""Which files of the checkout Ray ships to the nodes: the total size, excluded secrets, and refused links.

Ray packs the working directory of a job, follows every link, and stores the package on the head, where everybody with
access to the cluster can read it. Before that, `inspect_checkout` walks the checkout in the same way:
1. files that look like secrets (SECRETS) are excluded, and reported so that nobody misses them on the cluster;
2. a link that leads out of the checkout is refused, because Ray would ship its target, for example ~/.ssh;
3. a link to a folder that contains it is refused, because Ray would follow it for ever.

>>> inspect_checkout(Path("/home/ada/patchline"))
Checkout(sizes={"jobs/cluster": 214310, …}, secrets=[".env", "deploy/head.key"])
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import PathSpec

from data.checks import few, printable
from data.errors import UsageError

# Patterns as in .gitignore. They match names in every folder, whole folders too; endings in upper or lower case.
SECRETS = [
    *(".env", ".env.*", ".envrc", ".netrc", "_netrc", ".pgpass", ".git-credentials", ".npmrc", ".pypirc"),
    *(".ssh", ".aws", ".azure", ".config/gcloud", ".boto", ".s3cfg", ".kube", ".docker", ".gnupg", ".ray"),
    *("*.[kK][eE][yY]", "*.[pP][eE][mM]", "*.[pP]12", "*.[pP][fF][xX]", "*.[kK][dD][bB][xX]", "*.[jJ][kK][sS]"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "credentials.json", "auth_token"),
]
# Never shipped, nor is anything in .gitignore.
EXCLUDES = [".git", ".venv", "__pycache__", "/runs", "/shards", *SECRETS]
IGNORE_FILES = (".gitignore", ".rayignore")  # Ray reads both in every folder, for the contents of that folder


@dataclass(frozen=True)
class Checkout:
    """The files that Ray would ship."""

    sizes: Mapping[str, int]  # uncompressed bytes, by entry of the first two levels
    secrets: Sequence[str]  # excluded files and folders that look like secrets, relative to the checkout


def inspect_checkout(root: Path) -> Checkout:
    """Find what Ray would ship from `root`, like Ray itself. Raises UsageError for links that must not be followed."""
    sizes: Counter[str] = Counter()
    secrets: list[str] = []
    real_root = os.path.realpath(root)
    looks_secret = PathSpec.from_lines("gitignore", SECRETS)

    def walk(folder: Path, excludes: list[tuple[Path, PathSpec]], parents: Sequence[str]) -> None:
        """Add the files of a folder; `parents` contains the real paths of this folder and of those above it."""
        for name in IGNORE_FILES:
            if (folder / name).is_file():
                patterns = PathSpec.from_lines("gitignore", (folder / name).read_text().splitlines())
                excludes = [*excludes, (folder, patterns)]
        for path in folder.iterdir():
            # Like Ray: a pattern with a trailing slash matches the contents of a folder, but not the folder itself.
            if any(patterns.match_file(path.relative_to(base)) for base, patterns in excludes):
                continue
            name = str(path.relative_to(root))
            if looks_secret.match_file(name):
                secrets.append(name)
                continue
            real = os.path.realpath(path)
            # A broken link, or one to itself, is not shipped.
            if path.is_symlink() and path.exists():
                check_link(name, real)
            if path.is_dir():
                if real in parents:
                    raise refused_link(name, real, "to a folder that contains it, which Ray would follow for ever")
                walk(path, excludes, [*parents, real])
            elif path.is_file():
                sizes["/".join(path.relative_to(root).parts[:2])] += path.stat().st_size

    def check_link(name: str, real: str) -> None:
        if os.path.commonpath([real_root, real]) != real_root:
            raise refused_link(name, real, "out of the checkout, whose content would be shipped")
        # Another name for a secret, or for a file in a folder of secrets.
        if looks_secret.match_file(os.path.relpath(real, real_root)):
            raise refused_link(name, real, "to a file that looks like a secret, which would be shipped")

    def refused_link(name: str, real: str, problem: str) -> UsageError:
        return UsageError(
            f"{printable(str(root / name))} links to {printable(real)}: {problem}\n"
            "  expected links to files and folders inside the checkout\n"
            f"  remove the link, or exclude it: echo /{printable(name)} >> {root / '.rayignore'}"
        )

    own = [(root, PathSpec.from_lines("gitignore", [word for word in EXCLUDES if word not in SECRETS]))]
    walk(root, own, [real_root])
    return Checkout(dict(sizes), sorted(secrets))


def secrets_line(checkout: Checkout) -> str:
    """Return the line that names the excluded secrets; "" if there are none."""
    if not checkout.secrets:
        return ""
    return f"not shipped, because they may contain secrets: {few(list(map(printable, checkout.secrets)), 8)}"
