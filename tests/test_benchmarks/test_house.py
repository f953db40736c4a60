"""The counts of benchmarks/house.py for core and extras, compared with a hand count of four files."""

from pathlib import Path

import pytest

from benchmarks import house

pytestmark = pytest.mark.quick

FILES = {
    "data/__init__.py": "",
    "data/order.py": "class Order:\n    pass\n",
    "data/loader.py": "def load():\n    from data.order import Order\n\n    return Order()\n",
    "data/extras/__init__.py": "",
    "data/extras/survey.py": "from data import order\n\n\nclass Order(order.Order):\n    pass\n",
    "jobs/__init__.py": "",
    "jobs/run.py": "import data.loader\n",
    "tests/test_data/test_order.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_reachable_follows_imports_inside_functions_and_no_import_backwards(tree: Path) -> None:
    modules = house.modules_in(tree)
    assert house.reachable(["jobs.run"], modules) == {"jobs.run", "data", "data.loader", "data.order"}
    assert house.reachable(["data.order"], modules) == {"data.order"}


def test_reached_lines_equal_the_lines_of_the_files(tree: Path) -> None:
    modules = house.modules_in(tree)
    assert house.lines_of(["data.order", "data.loader", "jobs.run", "data"], modules) == 2 + 4 + 1 + 0


def test_class_name_in_two_modules_is_listed_with_both(tree: Path) -> None:
    assert house.classes_by_name(house.modules_in(tree)) == {"Order": ["data.extras.survey", "data.order"]}


def test_module_counts_as_tested_only_by_its_mirrored_test_file(tree: Path) -> None:
    untested = house.untested_modules(house.modules_in(tree), tree)
    assert untested == ["data.extras.survey", "data.loader", "jobs.run"]


def test_import_of_an_extra_by_the_core_is_counted(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "ROOTS", ("jobs.run",))
    assert house.centre_rows(tree, False)["imports of extras by the core"] == "0, from 0 files"
    (tree / "data/loader.py").write_text("from data.extras import survey\nfrom data.extras.survey import Order\n")
    assert house.centre_rows(tree, False)["imports of extras by the core"] == "1, from 1 files"
