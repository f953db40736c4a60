"""Checks of config fields: accepted values and error messages."""

import numpy as np
import pytest

from models.checks import did_you_mean, is_integer, multiple, pair

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("value", "expected"), [(3, (3, 3)), ([2, 5], (2, 5)), (np.int64(7), (7, 7)), ((1, 1), (1, 1))]
)
def test_one_number_is_a_pair_of_equal_python_integers(value, expected):
    result = pair("patch", value)
    assert result == expected
    assert [type(number) for number in result] == [int, int]


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", True, [1, 2, 3], [], None])
def test_anything_but_one_or_two_positive_integers_is_refused(value):
    with pytest.raises(ValueError, match=r"^patch must be one or two positive integers, found "):
        pair("patch", value)


@pytest.mark.parametrize(("value", "least", "expected"), [(1, 1, True), (0, 1, False), (0, 0, True), (True, 0, False)])
def test_boolean_is_not_an_integer(value, least, expected):
    assert is_integer(value, least) is expected


@pytest.mark.parametrize(("value", "nearest"), [(100, "96 or 108"), (7, "12"), (13, "12 or 24")])
def test_error_names_the_nearest_multiples_except_zero(value, nearest):
    with pytest.raises(ValueError, match=f"^width {value} is not a multiple of 12 heads; nearest: {nearest}$"):
        multiple("width", value, 12, "12 heads")
    multiple("width", 12 * value, 12, "12 heads")


def test_a_slip_gets_the_nearest_name_and_another_word_gets_all():
    names = ["softmax", "sigmoid", "masked"]
    assert did_you_mean("sofmax", names) == "; did you mean 'softmax'?"
    assert did_you_mean("qqq", names) == "; known: masked, sigmoid, softmax"


def test_names_that_differ_only_in_case_are_both_suggested():
    assert did_you_mean("g", ["g", "G", "So400m"]) == "; did you mean 'G' or 'g'?"
