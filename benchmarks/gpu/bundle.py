"""Bundles the packages that a bare GPU machine lacks, to be copied with the checkout; `make gpu-bundle` writes `.gpu/`.

    make gpu-bundle                                  here; a few minutes, 41 MB
    python3 -m benchmarks.gpu --bundle --out OUT     there, in the checkout

The machine has Python 3.12 on x86-64 with torch, torchvision, timm, transformers, OpenCV, pyarrow and pytest. It has no
network and perhaps no git. It lacks Ray, DeepSpeed, webdataset, omegaconf and their dependencies. constraints.txt
defines the versions.

1. Wheels are downloaded for the machine's Python, independent of the Python that runs this. DeepSpeed has no wheel: it
   is built from source without its operators, which needs no compiler.
2. Unused parts of Ray are removed, and symbols are stripped, which saves 150 of 210 MB.
3. `.gpu/site.tar.gz` holds the packages, `.gpu/commit` the commit, because the machine has no git.
"""

import gzip
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 64 << 20  # maximum size of checkout and bundle together
PYTHON = "3.12"
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]
WHEELS = [
    "ray",
    "webdataset",
    "omegaconf",
    "antlr4-python3-runtime",
    "braceexpand",
    "hjson",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
    "aiohttp-cors",
    "opencensus",
    "opencensus-context",
    "colorful",
    "smart_open",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "opentelemetry-proto",
    "opentelemetry-exporter-prometheus",
    "google-api-core",
    "googleapis-common-protos",
    "google-auth",
    "proto-plus",
]
REMOVED = [
    *(f"ray/{name}" for name in ("jars", "rllib", "serve", "llm", "tune", "train", "data", "air", "cpp")),
    "ray/dashboard/client",
    "ray/core/libjemalloc.so",
    "deepspeed/ops/csrc",
]
DASHBOARD_PAGE = "ray/dashboard/client/build/index.html"  # `ray start` fails without this folder
PROGRAMS = ["ray/core/src/ray/gcs/gcs_server", "ray/core/src/ray/raylet/raylet"]
# `ray` must be on PATH, and must run with the Python that has torch.
RAY_COMMAND = "#!/usr/bin/env python3\nimport sys\nfrom ray.scripts.scripts import main\nsys.exit(main())\n"
PTH_NAME = "patchline-bundle.pth"


# ------------------------------------------------------------------------ on this machine


def main() -> int:
    """Write `.gpu/`, print its size, and return 1 if it exceeds the limit."""
    folder = ROOT / ".gpu"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary) / "wheels"
        packages = Path(temporary) / "site"
        download(wheels)
        build_deepspeed(wheels, Path(temporary) / "source")
        for wheel in sorted(wheels.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(packages)
        trim(packages)
        write_archive(packages, folder / "site.tar.gz")

    from benchmarks.gpu.page import commit_of

    (folder / "commit").write_text(commit_of() + "\n")
    return report_size(bytes_of_checkout(ROOT), sum(path.stat().st_size for path in folder.iterdir()))


def report_size(checkout: int, bundle: int, limit: int = LIMIT_BYTES) -> int:
    """Print the sizes of checkout and bundle; return 1 if they exceed the limit."""
    total = checkout + bundle
    text = f"checkout {checkout / 2**20:.1f} MiB + .gpu {bundle / 2**20:.1f} MiB = {total / 2**20:.1f} MiB"
    print(f"{text} (limit {limit / 2**20:.0f} MiB)", flush=True)
    if total > limit:
        print("too large to be copied\n  remove more unused files: REMOVED in benchmarks/gpu/bundle.py")
        return 1
    return 0


def pinned(name: str, constraints: str) -> str:
    """Return "name==version" as pinned in constraints.txt; - and _ in the name are equivalent."""
    pattern = re.sub(r"[-_]", "[-_]", name)
    match = re.search(rf"^{pattern}===?(\S+)$", constraints, re.MULTILINE | re.IGNORECASE)
    if match is None:
        raise SystemExit(f"constraints.txt pins no {name}, which benchmarks/gpu/bundle.py needs")
    return f"{name}=={match[1]}"


def pip(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *map(str, words)], check=True)


def download(wheels: Path) -> None:
    """Download wheels for the machine's Python."""
    constraints = (ROOT / "constraints.txt").read_text()
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    pip("download", *options, "--dest", wheels, *[pinned(name, constraints) for name in WHEELS])


def build_deepspeed(wheels: Path, source: Path) -> None:
    """Build DeepSpeed's wheel without its operators; its setup needs torch, so use this environment."""
    requirement = pinned("deepspeed", (ROOT / "constraints.txt").read_text())
    os.environ.update({"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"})
    options = ["--no-deps", "--no-build-isolation"]
    pip("download", *options, "--no-binary", "deepspeed", "--dest", source, requirement)
    (archive,) = source.glob("deepspeed-*.tar.gz")
    pip("wheel", *options, "--no-index", "--wheel-dir", wheels, archive)


def trim(packages: Path) -> None:
    """Remove unused files, symbols and caches; add the command `ray`."""
    for name in REMOVED:
        path = packages / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for data in packages.glob("ray-*.data"):
        shutil.rmtree(data)
    page = packages / DASHBOARD_PAGE
    (page.parent / "static").mkdir(parents=True)
    page.touch()
    strip = shutil.which("strip")
    if strip:
        subprocess.run([strip, "--strip-unneeded", "ray/_raylet.so", *PROGRAMS], cwd=packages, check=True)
    command = packages / "bin" / "ray"
    command.parent.mkdir(exist_ok=True)
    command.write_text(RAY_COMMAND)
    for program in [*PROGRAMS, "bin/ray"]:
        (packages / program).chmod(0o755)
    for path in list(packages.rglob("*.pyi")):
        path.unlink()


def write_archive(packages: Path, target: Path) -> None:
    """Pack the folder reproducibly: the same files result in the same bytes."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = 0
        return member

    with (
        target.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file,
        tarfile.open(fileobj=file, mode="w") as archive,
    ):
        for path in sorted(packages.iterdir()):
            archive.add(path, path.name, filter=anonymous)


def bytes_of_checkout(root: Path) -> int:
    """Return the total size of files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    paths = [root / name for name in names if name]
    return sum(path.lstat().st_size for path in paths if path.is_file() and not path.is_symlink())


# ------------------------------------------------------------------------ on the GPU machine


def unpack(bundle: Path, target: Path) -> dict[str, str]:
    """Unpack the packages once, and return an environment in which this Python and its children find them.

    PYTHONPATH is not enough: workers and the memory tracer get a different PYTHONPATH. A .pth file in Python's
    site-packages adds the folder too. If site-packages is read-only, only PYTHONPATH is used.
    """
    archive = bundle / "site.tar.gz"
    if not archive.exists():
        raise SystemExit(f"no {archive}\n  run make gpu-bundle on a machine with network access, and copy .gpu/ here")
    stamp = target / ".unpacked"
    if not stamp.exists():
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as packages:
            packages.extractall(target, filter="tar")
        stamp.touch()
    try:
        (Path(site.getsitepackages()[0]) / PTH_NAME).write_text(f"{target}\n")
    except OSError as error:
        print(f"no .pth file: {error}; using only PYTHONPATH", file=sys.stderr)
    python = Path(sys.executable).parent
    paths = [str(python), str(target / "bin"), os.environ.get("PATH", "")]
    modules = [str(target), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PATH": os.pathsep.join(filter(None, paths)),
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
    }


if __name__ == "__main__":
    sys.exit(main())
