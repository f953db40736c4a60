"""The display of names in messages."""

import pytest

from data.index.names import MAX_SHOWN, preview

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("length", [1, 79, 80, 81, 300])
def test_long_names_are_cut_and_many_are_counted(length: int) -> None:
    shown = f"'{'x' * min(length, 80)}'"
    assert preview(["x" * length]) == shown
    assert preview(["x" * length] * MAX_SHOWN) == ", ".join([shown] * MAX_SHOWN)
    assert preview(["x" * length] * (MAX_SHOWN + 1)) == f"{', '.join([shown] * MAX_SHOWN)}, … ({MAX_SHOWN + 1} in all)"
