"""Checks of names, numbers and texts from users."""

import math
import os
from types import SimpleNamespace

import pytest

from data.checks import (
    at_least,
    check_file_name,
    check_name,
    check_sha256,
    encodable,
    few,
    more_than_0,
    printable,
    printable_lines,
)
from data.errors import ConfigError, DataError
from tests.support.hostile_names import HOSTILE_NAMES

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", ["a", "vit-b_16.v2", "x" * 64, "..."])
def test_a_name_of_letters_digits_dots_and_dashes_passes(name):
    check_name(name, "a stage", "type another")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "größe", "x" * 65, None, 3, "a\n"])
def test_a_name_that_could_be_a_path_is_refused(name):
    with pytest.raises(ConfigError, match=r"a stage is named .*\n  expected 1 to 64 .*\n  type another"):
        check_name(name, "a stage", "type another")


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_file_name_that_leads_outside_is_refused_with_its_source(name):
    with pytest.raises(DataError, match=r"^s3://bucket/run: unsafe name (?s:.*)\n  expected a path below the folder"):
        check_file_name(name, "s3://bucket/run")


@pytest.mark.parametrize("name", ["a", "a/b.json", "..a", "a..", "a/.../b", ".tmp-1", "größe/ñ", "a b"])
def test_file_name_below_the_folder_is_returned_unchanged(name):
    assert check_file_name(name, "a bucket") == name


def test_single_name_must_not_contain_a_slash():
    assert check_file_name("pretrain-1a2b", "a claim", folders=False) == "pretrain-1a2b"
    with pytest.raises(DataError, match="without slashes"):
        check_file_name("a/b", "a claim", folders=False)


@pytest.mark.parametrize("digest", ["../" + "a" * 61, "A" * 64, "a" * 63, "a" * 64 + "\n", None, 7])
def test_digest_that_could_be_a_path_is_refused(digest):
    assert check_sha256("0123456789abcdef" * 4, "an index") == "0123456789abcdef" * 4
    with pytest.raises(DataError, match="is not a sha256"):
        check_sha256(digest, "an index")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("cat", "cat"), ("\x1b[2J", "\\x1b[2J"), ("a\nb", "a\\nb"), ("\u202ecod", "\\u202ecod"), ("größe", "größe")],
)
def test_terminal_control_characters_are_escaped(text, shown):
    assert printable(text) == shown


def test_line_breaks_are_kept():
    assert printable_lines("a\x07\nb") == "a\\x07\nb"


def test_few_joins_the_first_texts_and_counts_the_rest():
    assert few(["a", "b", "c"], 3) == "a, b, c"
    assert few(["a", "b", "c", "d", "e"], 3) == "a, b, c and 2 more"


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True])
def test_at_least_0_rejects_negative_non_finite_and_boolean_values(value):
    finite = "a finite number, " if value in (math.inf, math.nan) else ""
    with pytest.raises(ConfigError, match=f"^data.workers is {value}, expected {finite}0 or more$"):
        at_least(SimpleNamespace(workers=value), 0, "workers", "data.")


def test_infinity_is_more_than_zero_but_not_a_finite_number():
    with pytest.raises(ConfigError, match=r"^optim.lr is inf, expected a finite number, more than 0$"):
        more_than_0(SimpleNamespace(lr=math.inf), "lr", "optim.")


@pytest.mark.parametrize("value", [0, 1, 2.5, None])
def test_lowest_allowed_value_and_none_pass(value):
    at_least(SimpleNamespace(workers=value), 0, "workers")


@pytest.mark.parametrize(("value", "passes"), [(0, False), (1e-9, True), (None, True), (False, False)])
def test_zero_is_not_more_than_zero(value, passes):
    config = SimpleNamespace(rate=value)
    if passes:
        more_than_0(config, "rate")
    else:
        with pytest.raises(ConfigError, match=r"rate is .*, expected more than 0"):
            more_than_0(config, "rate")


def test_a_name_that_is_not_utf_8_can_be_encoded():
    assert encodable(os.fsdecode(b"caf\xe9.tar")) == "caf\\udce9.tar"
    assert encodable("café.tar") == "café.tar"
