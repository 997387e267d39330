"""Makes the helpers of tests/support and the rank pool importable by name; pytest's importlib mode adds no folder by itself."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE / "support", HERE / "parallel"):
    sys.path.append(str(folder))
