"""Parts of an installation that may be missing."""

import json

import pytest

from data.optional import MissingExtra, load_optional

pytestmark = pytest.mark.quick


def test_an_installed_part_is_imported_by_its_name():
    assert load_optional("json:dumps", "the recipe") is json.dumps


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("data.extras.gone:Decoder", "data/extras/gone"),
        ("data.extras.gone.inside:Decoder", "data/extras/gone"),
    ],
)
def test_a_missing_part_is_named_with_what_needs_it(name, missing):
    with pytest.raises(MissingExtra, match=f"^data.decode=gpu needs {missing}, which is not installed$"):
        load_optional(name, "data.decode=gpu")


def test_missing_library_of_a_part_is_not_mistaken_for_the_part(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_optional("needs_another:function", "data.decode=gpu")
