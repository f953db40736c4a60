"""Reading a recipe: overrides, interpolations, and what is refused."""

from pathlib import Path

import pytest

from data.errors import ConfigError
from pipeline.recipe import read_recipe, to_yaml, with_overrides

pytestmark = pytest.mark.quick


def test_overrides_reach_into_the_recipe_and_stage_references_need_no_quotes(tmp_path: Path):
    file = tmp_path / "r.yaml"
    file.write_text("a: {b: 1}\n")
    values = read_recipe(file, ["a.b=2", "a.c=@stage/part", "d=[1, 2]"]).values
    assert values == {"a": {"b": 2, "c": "@stage/part"}, "d": [1, 2]}


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n"])
def test_broken_recipe_is_refused(tmp_path: Path, text: str):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError):
        read_recipe(tmp_path / "r.yaml")


def test_missing_recipe_and_malformed_override_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no recipe at"):
        read_recipe(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"is a folder\n  expected a recipe \(a YAML file\)"):
        read_recipe(tmp_path)
    with pytest.raises(ConfigError, match="expected key=value"):
        with_overrides({}, ["steps"])


def test_environment_values_stay_unresolved_in_saved_yaml(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATCHLINE_SECRET", "hunter2")
    assert "hunter2" not in to_yaml({"a": "${oc.env:PATCHLINE_SECRET}"})


SECRET_VALUES = [
    "-----BEGIN RSA PRIVATE KEY-----",
    "AKIAABCDEFGHIJKLMNOP",
    "ghp_0123456789abcdefABCDEF",
    "hf_0123456789abcdefABCDEF",
    "https://ada:hunter2@host/data",
    "eyJhbGciOiJI.eyJzdWIiOiIx",
]


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:WANDB_API_KEY}",
        "x/${oc.env:DB_PASSWORD}/y",
        "${oc.env:API_TOKEN,none}",
        "${oc.decode:${oc.env:SECRET}}",
    ],
)
@pytest.mark.parametrize("place", ["section", "list", "override"])
def test_variable_with_the_name_of_a_secret_is_refused(text, place, monkeypatch) -> None:
    for name in ("WANDB_API_KEY", "DB_PASSWORD", "API_TOKEN", "SECRET"):
        monkeypatch.setenv(name, "hunter2")
    values = {"section": {"a": {"b": text}}, "list": {"a": {"b": [1, text]}}, "override": {}}[place]
    overrides = [f"a.b={text}"] if place == "override" else []
    with pytest.raises(ConfigError, match=r"^a\.b.* refers to \w+, which looks like the name of a secret") as refusal:
        with_overrides(values, overrides)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_variable_with_the_value_of_a_secret_is_refused_without_repeating_it(value, monkeypatch) -> None:
    monkeypatch.setenv("DATA", value)
    # `copy` has no variable itself, but refers to one.
    for values in ({"a": "${oc.env:DATA}"}, {"a": ["${oc.env:DATA}"]}, {"copy": "${a}", "a": "${oc.env:DATA}"}):
        with pytest.raises(ConfigError, match="whose value looks like a secret") as refusal:
            with_overrides(values, [])
        assert value not in str(refusal.value)


@pytest.mark.parametrize("name", ["DATA", "TOKENIZERS_PARALLELISM", "TOKEN_FILE", "KEY_PATH", "MONKEY"])
@pytest.mark.parametrize("value", ["/data/hf-vit-base-patch16-224", "s3://bucket/train", "3"])
def test_ordinary_variable_is_replaced_by_its_value(name, value, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    assert str(with_overrides({"a": f"${{oc.env:{name}}}"}, [])["a"]) == value


def test_interpolations_are_resolved_and_missing_ones_reported():
    assert with_overrides({"a": 1, "b": "${a}"}, []) == {"a": 1, "b": 1}
    with pytest.raises(ConfigError, match=r"^Interpolation key 'missing' not found\n  in b$"):
        with_overrides({"b": "${missing}"}, [])


def test_another_model_keeps_only_image_size_and_classes() -> None:
    """A width from the recipe's own model would silently make S/16 another model."""
    recipe = {"pretrain": {"model": {"name": "mu/8", "width": 192, "image_size": 64, "classes": 3}}}
    written_as_text = {"pretrain": {"model": "mu/8"}}
    another = with_overrides(recipe, ["pretrain.model=S/16", "pretrain.model.dropout=0.1"])
    assert another == {"pretrain": {"model": {"name": "S/16", "image_size": 64, "classes": 3, "dropout": 0.1}}}
    both = with_overrides(written_as_text, ["pretrain.model.classes=3"])
    assert both == {"pretrain": {"model": {"name": "mu/8", "classes": 3}}}
    replaced = with_overrides(recipe, ["pretrain.model={name: B/16}"])
    assert replaced == {"pretrain": {"model": {"name": "B/16", "image_size": 64, "classes": 3}}}
    quoted = with_overrides(recipe, ['pretrain.model={"name": B/16, classes: 5}'])
    assert quoted == {"pretrain": {"model": {"name": "B/16", "image_size": 64, "classes": 5}}}
    # Values that only resemble a name: a text that contains one, and a section with one.
    for value in ('{stem: "{name"}', "{stem: [a, name]}", "{inner: {name: x}}"):
        assert with_overrides(recipe, [f"pretrain.model={value}"])["pretrain"]["model"]["width"] == 192, value
    merged = with_overrides(recipe, ["pretrain.model={dropout: 0.1}"])
    assert merged["pretrain"]["model"]["width"] == 192  # a section without a name is merged like any other


@pytest.mark.parametrize(
    ("content", "problem", "expected"),
    [
        (b"a:\n\tb: 1\n", "line 2: found a tab character", "spaces before a key, not tabs"),
        (b"a:\n  b:\n  \tc: 1\n", "line 3: found a tab character", "spaces before a key, not tabs"),
        (b"a: @b\n", "line 1: found character that cannot start any token", "quotes around text that begins with @"),
        (b"a: %50\n", "line 1: found character that cannot start any token", "quotes around text that begins with @"),
        (b"a: *b\n", "line 1: found undefined alias", "quotes around text that begins with \\*"),
        (b"a: &x 1\nb: &x 2\nc: *x\n", "line 2: second occurrence", "another &name"),
        ("a: 1\n".encode("utf-16"), "r.yaml is UTF-16 text; to convert it, run iconv -f UTF-16", "saved as UTF-8"),
        ("a: 1\n".encode("utf-16-be"), "unacceptable character", "text without control characters"),
        ("# café\na: 1\n".encode("latin-1"), "is not UTF-8 text: invalid byte at 5, in line 1", "saved as UTF-8"),
    ],
)
def test_unreadable_text_is_refused_with_the_cause_and_a_remedy(content, problem, expected, tmp_path):
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=f"{problem}(.|\n)*\n  expected (a recipe \\(a YAML file\\) )?{expected}"):
        read_recipe(tmp_path / "r.yaml")


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbfa:\r\n  b: 1\r\n")
    assert read_recipe(tmp_path / "r.yaml").values == {"a": {"b": 1}}
