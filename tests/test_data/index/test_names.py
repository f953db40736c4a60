"""The display of names in messages."""

import pytest

from data.index.names import MOST_SHOWN, preview

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("length", [1, 79, 80, 81, 300])
def test_long_names_are_cut_and_many_are_counted(length: int) -> None:
    shown = f"'{'x' * min(length, 80)}'"
    assert preview(["x" * length]) == shown
    assert preview(["x" * length] * MOST_SHOWN) == ", ".join([shown] * MOST_SHOWN)
    assert (
        preview(["x" * length] * (MOST_SHOWN + 1)) == f"{', '.join([shown] * MOST_SHOWN)}, … ({MOST_SHOWN + 1} in all)"
    )
