"""Arrays that were made from the original code, where they lie beside the checkout: `../shared/golden`."""

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"the golden data is not beside this checkout: {GOLDEN}")
