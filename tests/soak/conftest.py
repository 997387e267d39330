"""Makes the helpers of the other folders importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("faults", "workflows"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))
