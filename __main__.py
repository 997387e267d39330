"""`python -m phase_parallel ...` when the pack is installed, `python FOLDER_OF_THE_PACK ...` when not."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from pathlib import Path


def _package_name() -> str:
    """The name under which this folder is a package; run by its path it has none yet, and gets the usual."""
    if __package__:
        return __package__
    root = Path(__file__).resolve().parent
    # Python put the pack's folder first on the path; its rooms have names that other packages have too.
    sys.path[:] = [place for place in sys.path if not place or Path(place).resolve() != root]
    name = "phase_parallel"
    spec = importlib.util.spec_from_file_location(
        name, root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return name


if __name__ == "__main__":
    sys.exit(import_module(f"{_package_name()}.launch.cli").main())
