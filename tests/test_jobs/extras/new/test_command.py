"""How `jobs new` parses a time."""

import pytest
import typer

from jobs.extras.new.command import minutes_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("text", "minutes"), [("10", 10), ("90s", 1.5), ("2min", 2), ("1h", 60)])
def test_a_time_is_in_minutes_unless_it_has_a_unit(text, minutes) -> None:
    assert minutes_of(text) == minutes


def test_a_text_without_a_time_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="expected a number of minutes"):
        minutes_of("soon")
