"""The table of areas names every test file once, so that no time is left out of what `make test` reports."""

from pathlib import Path

from tests.areas import AREAS, QUICK


def test_every_test_file_belongs_to_one_area() -> None:
    named = [file for files in AREAS.values() for file in files]
    written = [path.name for path in Path(__file__).parent.glob("test_*.py")]
    assert sorted(named) == sorted(written)


def test_the_quick_files_exist() -> None:
    written = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert set(QUICK) <= written
