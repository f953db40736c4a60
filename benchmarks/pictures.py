"""Take the screenshots for docs/runs.md: the page of one run, and the page that compares two runs.

    python -m tests.support.demo                                     # a run with a restart
    python -m jobs run digits run=runs/second pretrain.optim.lr=0.003
    python -m benchmarks.pictures runs/demo-… runs/second          # writes docs/pictures/report*.png
    python -m benchmarks.pictures runs/demo-… runs/second --all FOLDER    # four widths, light and dark

Chromium has to be installed (tests/support/browser.py).
"""

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from jobs.extras.report.page import write_report
from tests.support.browser import Browser

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
WIDTHS = (400, 500, 800, 1400)
SHOWN = 1290  # pixels of a page's height


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
                    # 64 colours look the same and need a third of the bytes.
                    Image.open(PICTURES / f"{name}.png").quantize(64).save(PICTURES / f"{name}.png", optimize=True)
                    continue
                arguments.all.mkdir(parents=True, exist_ok=True)
                for width in WIDTHS:
                    for mode in ("light", "dark"):
                        browser.open(page, width=width, dark=mode == "dark")
                        browser.screenshot(arguments.all / f"{name}-{width}-{mode}.png")


if __name__ == "__main__":
    main()
