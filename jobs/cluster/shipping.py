"""Determine which files in the checkout Ray ships to the nodes; exclude secrets, and refuse unsafe links.

Ray packs a job's working directory, follows every link, and stores the package on the head node, where everybody with
access to the cluster can read it. Before that, `inspect_checkout` walks the checkout in the same way:
1. Files that look like secrets (SECRETS) are excluded, and reported in case they are needed on the cluster.
2. A link that leads out of the checkout is refused, because Ray would ship its target, for example ~/.ssh.
3. A link to a folder that contains the link is refused, because Ray would follow it forever.

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

# Patterns as in .gitignore, which match files and folders at any depth; file endings match in upper and lower case.
SECRETS = [
    *(".env", ".env.*", ".envrc", ".netrc", "_netrc", ".pgpass", ".git-credentials", ".npmrc", ".pypirc"),
    *(".ssh", ".aws", ".azure", ".config/gcloud", ".boto", ".s3cfg", ".kube", ".docker", ".gnupg", ".ray"),
    *("*.[kK][eE][yY]", "*.[pP][eE][mM]", "*.[pP]12", "*.[pP][fF][xX]", "*.[kK][dD][bB][xX]", "*.[jJ][kK][sS]"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "credentials.json", "auth_token"),
]
# Never shipped, like everything in .gitignore.
EXCLUDES = [".git", ".venv", "__pycache__", "/runs", "/shards", *SECRETS]
IGNORE_FILES = (".gitignore", ".rayignore")  # Ray reads both in every folder, for the contents of that folder


@dataclass(frozen=True)
class Checkout:
    """The files that Ray would ship."""

    sizes: Mapping[str, int]  # uncompressed bytes, by entry of the first two levels
    secrets: Sequence[str]  # excluded files and folders that look like secrets, relative to the checkout


def inspect_checkout(root: Path) -> Checkout:
    """Find the files that Ray would ship from `root`. Raises UsageError for links that must not be followed."""
    sizes: Counter[str] = Counter()
    secrets: list[str] = []
    real_root = os.path.realpath(root)
    looks_secret = PathSpec.from_lines("gitignore", SECRETS)

    def walk(folder: Path, excludes: list[tuple[Path, PathSpec]], parents: Sequence[str]) -> None:
        """Add a folder's files to `sizes` or `secrets`; `parents` are the real paths of the folder and its parents."""
        for name in IGNORE_FILES:
            if (folder / name).is_file():
                patterns = PathSpec.from_lines("gitignore", (folder / name).read_text().splitlines())
                excludes = [*excludes, (folder, patterns)]
        for path in folder.iterdir():
            # As in Ray, a pattern with a trailing slash matches the contents of a folder, but not the folder itself.
            if any(patterns.match_file(path.relative_to(base)) for base, patterns in excludes):
                continue
            name = str(path.relative_to(root))
            if looks_secret.match_file(name):
                secrets.append(name)
                continue
            real = os.path.realpath(path)
            # Ray does not ship broken links and links to themselves.
            if path.is_symlink() and path.exists():
                check_link(name, real)
            if path.is_dir():
                if real in parents:
                    raise refused_link(
                        name, real, "the link leads back to a folder that contains it, so Ray would follow it forever"
                    )
                walk(path, excludes, [*parents, real])
            elif path.is_file():
                sizes["/".join(path.relative_to(root).parts[:2])] += path.stat().st_size

    def check_link(name: str, real: str) -> None:
        if os.path.commonpath([real_root, real]) != real_root:
            raise refused_link(name, real, "Ray would ship files that are outside the checkout")
        # The target may be a secret, or a file in a folder of secrets.
        if looks_secret.match_file(os.path.relpath(real, real_root)):
            raise refused_link(name, real, "Ray would ship the target of the link, which looks like a secret")

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
    """Return a line that lists the excluded secrets; "" if there are none."""
    if not checkout.secrets:
        return ""
    return f"not shipped, because they may contain secrets: {few(list(map(printable, checkout.secrets)), 8)}"
