"""Make the pictures in docs/pictures: the page of a run, the page of two runs, learning curves, and attention.

    python -m jobs run digits run=runs/first
    python -m jobs run digits run=runs/second pretrain.optim.lr=0.003
    python -m benchmarks.pictures runs/first runs/second           # writes docs/pictures/report*.png and others
    python -m benchmarks.pictures runs/first runs/second --all FOLDER     # pages only: four widths, light and dark

The first run needs a stage `finetune` and a packed set `test`. Chromium has to be installed (tests/support/browser.py).
"""

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from jobs.extras.analyze.analyze import analyze
from jobs.extras.report.page import write_report
from jobs.extras.report.paper import write_figures
from tests.support.browser import Browser

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
WIDTHS = (400, 500, 800, 1400)
SHOWN = 1290  # pixels of a page's height
ATTENDED = 2  # images of each tar in attention.png


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("first", type=Path, help="a run directory")
    parser.add_argument("second", type=Path)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write whole pages there, in every width and mode")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        # Show the runs by short names, independent of their paths.
        runs = []
        for name, run in (("first", arguments.first), ("second", arguments.second)):
            runs.append(Path(shutil.copytree(run, Path(temporary) / "runs" / name)))
        pages = {
            "report": write_report(runs[:1], Path(temporary) / "report.html"),
            "report-two": write_report(runs, Path(temporary) / "two.html"),
        }
        for page in pages.values():
            page.write_text(page.read_text().replace("<wbr>", "").replace(f"{temporary}/", ""))
        with Browser(Path(temporary)) as browser:
            for name, page in pages.items():
                if arguments.all is None:
                    browser.open(page, width=1000, dark=name == "report-two")
                    browser.screenshot(PICTURES / f"{name}.png", SHOWN)
                    shrink(PICTURES / f"{name}.png")
                    continue
                arguments.all.mkdir(parents=True, exist_ok=True)
                for width in WIDTHS:
                    for mode in ("light", "dark"):
                        browser.open(page, width=width, dark=mode == "dark")
                        browser.screenshot(arguments.all / f"{name}-{width}-{mode}.png")
        if arguments.all is None:
            write_figures(runs, Path(temporary) / "figures")
            shutil.copy(Path(temporary) / "figures" / "pretrain-training-loss.svg", PICTURES / "learning-curve.svg")
            images = [str(path) for path in runs[0].glob("shards-*/test")]
            analyze(str(next(runs[0].glob("finetune-*"))), images, f"{temporary}/analysis", limit=ATTENDED)
            attention = Image.open(f"{temporary}/analysis/attention.png")
            attention.resize((attention.width // 2, attention.height // 2)).save(PICTURES / "attention.png")
            shrink(PICTURES / "attention.png")


def shrink(path: Path) -> None:
    """Reduce a picture to 64 colours, which look the same and need a third of the bytes."""
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main()
