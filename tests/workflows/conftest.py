"""Makes the converter importable by name; pytest's importlib mode adds no folder by itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
