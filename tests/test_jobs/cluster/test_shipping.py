"""No secret and nothing outside the checkout is shipped, judged by the package that Ray itself makes."""

import zipfile
from pathlib import Path

import pytest
from ray._private.runtime_env.packaging import create_package

from data.errors import UsageError
from jobs.cluster.shipping import EXCLUDES, inspect_checkout, secrets_line

pytestmark = pytest.mark.quick


def shipped_by_ray(root: Path) -> dict[str, int]:
    """Return the name and size of every file in the package that Ray makes of a checkout."""
    package = root.with_name("package.zip")
    create_package(str(root), package, include_gitignore=True, excludes=list(EXCLUDES))
    return {entry.filename: entry.file_size for entry in zipfile.ZipFile(package).infolist() if not entry.is_dir()}


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    make(root, "train.py")
    return root


def test_measured_size_is_that_of_rays_package(tmp_path) -> None:
    """Ignore files apply below their folder, `!` re-includes files; the expected size is that of Ray's package."""
    root = tmp_path / "root"
    contents = {
        ".gitignore": "*.log\nbuild/\n/top\n",
        "deep/.gitignore": "/inner\n",
        "deep/.rayignore": "*.bin\n!keep.bin\n",
    }
    names = ["a.log", "build/x", "top", "inner", "b.bin", "runs/x", ".git/config"]
    names += ["deep/top", "deep/inner", "deep/b.bin", "deep/keep.bin", "deep/er/c.bin", "deep/runs/y"]
    names += ["deep/__pycache__/z"]
    for name in names:
        contents[name] = "x" * len(name)
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    packed: dict[str, int] = {}
    for name, size in shipped_by_ray(root).items():
        top = "/".join(name.split("/")[:2])
        packed[top] = packed.get(top, 0) + size
    assert inspect_checkout(root).sizes == packed


SECRET_FILES = [
    *(".env", ".env.production", "deploy/.env", ".netrc", ".pgpass", ".git-credentials", ".npmrc", ".pypirc"),
    *(".ssh/id_ed25519", "home/.ssh/config", ".aws/credentials", ".azure/token.json", ".kube/config"),
    *(".config/gcloud/credentials.db", ".docker/config.json", ".ray/auth_token", "deploy/auth_token"),
    *("server.key", "tls/SERVER.KEY", "tls/server.pem", "tls/a.PEM", "a.p12", "a.pfx", "id_rsa", "x/id_ecdsa.pub"),
]


@pytest.mark.parametrize("name", SECRET_FILES)
def test_secret_is_neither_shipped_nor_measured_but_named(name, root) -> None:
    make(root, name)
    checkout = inspect_checkout(root)
    assert set(shipped_by_ray(root)) == {"train.py"}
    assert dict(checkout.sizes) == {"train.py": 8}
    # A folder of secrets is named as a folder.
    assert len(checkout.secrets) == 1
    assert name.startswith(checkout.secrets[0])
    assert checkout.secrets[0] in secrets_line(checkout)


def test_ignore_file_cannot_include_a_secret_again(root) -> None:
    make(root, ".env")
    (root / ".rayignore").write_text("!.env\n")
    assert ".env" not in shipped_by_ray(root)
    assert inspect_checkout(root).secrets == [".env"]


@pytest.mark.parametrize("name", ["keys.py", "environment.yaml", "models/key.py", "deploy/patchline.env", "tokens.txt"])
def test_file_with_a_similar_name_is_shipped(name, root) -> None:
    make(root, name)
    assert name in shipped_by_ray(root)
    assert inspect_checkout(root).secrets == []
    assert secrets_line(inspect_checkout(root)) == ""


@pytest.mark.parametrize("target", ["../outside", "../outside/secret.txt", "/etc", "/etc/hostname", "..", "/"])
@pytest.mark.parametrize("place", ["link", "deep/er/link"])
def test_link_out_of_the_checkout_is_refused(place, target, root) -> None:
    make(root, "../outside/secret.txt", "deep/er/file")
    (root / place).symlink_to((root / target).resolve())
    with pytest.raises(
        UsageError, match=r"link links to .*: Ray would ship files that are outside the checkout(?s:.*)\.rayignore"
    ):
        inspect_checkout(root)


def test_link_to_a_secret_under_another_name_is_refused(root) -> None:
    make(root, ".env", ".aws/config")
    for target in (".env", ".aws/config", ".aws"):
        (root / "harmless").symlink_to(target)
        with pytest.raises(UsageError, match="Ray would ship the target of the link, which looks like a secret"):
            inspect_checkout(root)
        (root / "harmless").unlink()


@pytest.mark.parametrize(
    "links", [{"loop": "."}, {"a/loop": ".."}, {"a/to_b": "../b", "b/to_a": "../a"}, {"a/b/up": "../../a"}]
)
def test_endless_chain_of_links_is_refused(links, root) -> None:
    make(root, "a/file", "a/b/file", "b/file")
    for name, target in links.items():
        (root / name).symlink_to(target)
    with pytest.raises(UsageError, match="the link leads back to a folder that contains it, so Ray would follow it"):
        inspect_checkout(root)


def test_link_inside_the_checkout_and_broken_links_pass(root) -> None:
    make(root, "data/a.txt")
    (root / "same").symlink_to("data")
    (root / "broken").symlink_to("nothing")
    (root / "itself").symlink_to("itself")
    assert inspect_checkout(root).sizes == {"train.py": 8, "data/a.txt": 10, "same/a.txt": 10}
    assert set(shipped_by_ray(root)) == {"train.py", "data/a.txt", "same/a.txt"}


def test_excluded_link_out_of_the_checkout_passes(root) -> None:
    (root / "link").symlink_to("/etc")
    (root / ".rayignore").write_text("/link\n")
    assert "link" not in str(shipped_by_ray(root))
    assert inspect_checkout(root).sizes == {"train.py": 8, ".rayignore": 6}
