"""Read golden arrays, which the original code produced, from `../shared/golden` next to the checkout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"the golden data is not beside this checkout: {GOLDEN}")


def read_golden(name: str) -> Any:
    """Return the arrays or the JSON of a golden file; skip the test if the file is missing."""
    path = GOLDEN / name
    if not path.exists():
        pytest.skip(f"golden data is absent: ../shared/golden/{name}")
    return json.loads(path.read_text()) if path.suffix == ".json" else np.load(path)
