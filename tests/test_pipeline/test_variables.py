"""Records of a run hold the names of environment variables and digests, not their values."""

import pytest

from data.errors import DataError
from pipeline import variables
from pipeline.recipe import with_overrides
from pipeline.variables import noted, recorded, restored

pytestmark = pytest.mark.quick

PLACE = "/private/projects of ada"


@pytest.fixture(autouse=True)
def no_values(monkeypatch) -> None:
    monkeypatch.setattr(variables, "_values", {})
    monkeypatch.setenv("PLACE", PLACE)


def test_values_are_recorded_as_variables_with_a_digest_and_restored() -> None:
    values = with_overrides({"a": {"train": "${oc.env:PLACE}/train"}, "b": ["x ${oc.env:PLACE}", 3, None]}, [])
    assert values["a"] == {"train": f"{PLACE}/train"}
    record = recorded(values)
    assert record == {
        "a": {"train": f"${{oc.env:PLACE}}/train (sha256 {variables.digest_of([PLACE])})"},
        "b": [f"x ${{oc.env:PLACE}} (sha256 {variables.digest_of([PLACE])})", 3, None],
    }
    assert restored(record, "task.json") == values
    # What the driver derives from a value is recorded in the same way, and what is recorded stays so.
    assert "ada" not in recorded(f"{PLACE}/parts-1a2b3c4d/train")
    assert recorded(record) == record


def test_changed_or_missing_variable_is_reported_without_its_value(monkeypatch) -> None:
    with_overrides({"a": "${oc.env:PLACE}/train"}, [])
    before = recorded(f"{PLACE}/train")
    monkeypatch.setenv("PLACE", "/another/place")
    with_overrides({"a": "${oc.env:PLACE}/train"}, [])
    after = recorded("/another/place/train")
    assert before != after
    assert before.split(" (")[0] == after.split(" (")[0] == "${oc.env:PLACE}/train"
    for change in (lambda: None, lambda: monkeypatch.delenv("PLACE")):
        change()
        with pytest.raises(
            DataError, match=r"task.json contains \$\{oc.env:PLACE\}/train, but PLACE is not set, or"
        ) as error:
            restored(before, "task.json")
        assert "ada" not in str(error.value)


def test_two_variables_in_one_text_are_restored_whatever_their_order(monkeypatch) -> None:
    monkeypatch.setenv("INNER", f"{PLACE}/inner/of/it")
    values = with_overrides({"a": "${oc.env:INNER}:${oc.env:PLACE}", "b": "${oc.env:PLACE}:${oc.env:INNER}"}, [])
    record = recorded(values)
    assert "ada" not in str(record)
    assert restored(record, "task.json") == values


@pytest.mark.parametrize("text", ["{0}/a,{0}/b", "{1}/a,{0}/b", "{0}/a,{1}/b,{0}/c", "{2}/a,{1}/b,{2}/c"])
def test_repeated_variables_and_values_of_equal_length_are_restored(text, monkeypatch) -> None:
    places = [PLACE, PLACE.replace("ada", "eve"), f"{PLACE}/inner"]
    for name, place in zip(("PLACE", "OTHER", "INNER"), places, strict=True):
        monkeypatch.setenv(name, place)
        with_overrides({"a": f"${{oc.env:{name}}}/train"}, [])
    record = recorded(text.format(*places))
    assert "ada" not in record
    assert restored(record, "task.json") == text.format(*places)


@pytest.mark.parametrize("value", ["3", "1e-3", "adamw", "S/16", "random_resized_crop", "ada"])
def test_numbers_and_words_are_recorded_as_they_are(value, monkeypatch) -> None:
    """Results depend on them; in other texts they would be found by chance."""
    monkeypatch.setenv("CHOICE", value)
    with_overrides({"a": "${oc.env:CHOICE}"}, [])
    assert noted() == {}
    assert recorded({"b": f"{value} and more"}) == {"b": f"{value} and more"}
