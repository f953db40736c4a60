"""The command line: runs all parts or selected ones. With `--part`, it runs one part, as a child process of the runner.

No large packages are imported at the top: on a bare machine most of them are missing until the bundle is unpacked.
"""

import argparse
import ctypes
import datetime
import os
import shutil
import signal
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import __doc__ as DESCRIPTION

ROOT = Path(__file__).parents[2]
BUDGET_S = 560.0  # fits into ten minutes, including the start of the machine
CORES_OF_A_PART = 3  # cores for each of the parallel parts
NO_GPU = 69  # exit code: unavailable
LOGS = ("log.txt", "metrics.jsonl", "*.log")  # files to pack after a run
PR_SET_PDEATHSIG = 1  # from prctl.h


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return the exit code, which is 1 if a part failed or was stopped."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="cuda if torch sees a GPU, cpu otherwise")
    parser.add_argument("--out", type=Path, help="folder for results.jsonl, log.txt and the page")
    parser.add_argument("--work", type=Path, help="folder for temporary files, which are kept (10 GB on a GPU machine)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="run only parts whose names contain a WORD"
    )
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="total seconds for all parts")
    parser.add_argument("--bundle", action="store_true", help="unpack .gpu/ first and run with its packages")
    parser.add_argument("--site", type=Path, default=Path("/tmp/patchline-site"), help="where --bundle unpacks it")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    if options.bundle:
        from benchmarks.gpu.bundle import unpack

        words = [word for word in (sys.argv[1:] if arguments is None else arguments) if word != "--bundle"]
        environment = unpack(ROOT / ".gpu", options.site)
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *words], environment)

    if options.part:
        return run_part(options)

    import torch

    has_gpu = torch.cuda.is_available()
    device = options.device or ("cuda" if has_gpu else "cpu")
    if device == "cuda" and not has_gpu:
        print("no GPU: torch.cuda.is_available() is False\n  run make gpu DEVICE=cpu to rehearse it", file=sys.stderr)
        return NO_GPU
    return run_all(device, options)


def run_part(options: argparse.Namespace) -> int:
    """Run one part in this process; the process ends if the runner ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    from benchmarks.gpu.parts import Context, parts_of

    for part in parts_of(options.device):
        if part.name == options.part:
            part.run(Context(options.device, options.work, options.rows))
            return 0
    raise SystemExit(f"unknown part {options.part!r}")


def run_all(device: str, options: argparse.Namespace) -> int:
    """Run the parts for a device in separate processes."""
    from benchmarks.gpu import page
    from benchmarks.gpu.parts import Part, parts_of
    from benchmarks.gpu.run import Run

    parts = parts_of(device)
    if options.only:
        parts = [part for part in parts if any(word in part.name for word in options.only)]
    date = datetime.date.today().isoformat()
    prefix = "gpu" if device == "cuda" else "gpu-rehearsal"
    folder = options.out or ROOT / "runs" / f"{prefix}-{date}"
    target = folder / f"gpu-{date}.md"
    if device == "cuda" and not options.out:
        target = ROOT / "benchmarks" / f"gpu-{date}.md"
    work = (options.work or Path(tempfile.mkdtemp(prefix="patchline-gpu-"))).resolve()

    def command_of(part: Part, rows: Path) -> list[str]:
        words = ["--device", device, "--part", part.name, "--rows", str(rows), "--work", str(work)]
        return [sys.executable, "-m", "benchmarks.gpu", *words]

    command = f"python -m benchmarks.gpu --device {device}"
    render = partial(page.page, device=device, date=date, command=command, commit=page.commit_of())
    environment = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "TRITON_CACHE_DIR": str(work / "triton"),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    slots = max(2, (os.cpu_count() or 1) // CORES_OF_A_PART)
    run = Run(
        parts,
        command_of,
        render,
        page=target,
        folder=folder,
        work=work,
        budget_s=options.budget,
        slots=slots,
        environment=environment,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(f"writing results to {target}", flush=True)
    try:
        outcomes = run.run()
    finally:
        pack_logs(work, folder / "logs.tar.gz")
        if not options.work:
            shutil.rmtree(work, ignore_errors=True)
    return int(any(outcome.state != "done" for outcome in outcomes))


def pack_logs(work: Path, target: Path) -> None:
    """Pack the logs and metrics of all parts, which help to explain unexpected rows."""
    with tarfile.open(target, "w:gz") as archive:
        for pattern in LOGS:
            for path in sorted(work.rglob(pattern)):
                archive.add(path, path.relative_to(work))


if __name__ == "__main__":
    sys.exit(main())
