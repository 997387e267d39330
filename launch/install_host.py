"""Last step of the set-up, run inside .venv: have a ComfyUI, and install what its requirements.txt adds.

Never used in a user's own environment: there the packages are the user's business, and `doctor` names missing
ones.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from .errors import LaunchError
from .find_host import PACKAGE, find_host

# The set-up has chosen these to fit each other; a ComfyUI names them without a version.
_CHOSEN_BY_SETUP = frozenset({"torch", "torchvision", "torchaudio"})


def missing_requirements(requirements: Path) -> list[str]:
    """Lines of a requirements.txt whose package is absent, or present in another version than an exact pin
    asks for.
    """
    missing = []
    for line in requirements.read_text().splitlines():
        found = re.match(r"([A-Za-z0-9._-]+)\s*(?:==\s*([^\s;,]+))?", line.strip())
        if not found or found[1].lower() in _CHOSEN_BY_SETUP:
            continue
        try:
            version = importlib.metadata.version(found[1])
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or found[2] not in (None, version):
            missing.append(line.strip())
    return missing


def main() -> int:
    try:
        host = find_host(print, comfy_dir=os.environ.get("COMFYUI_DIR"))
    except LaunchError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    requirements = host.root / "requirements.txt"
    # The packaged ComfyUI's list is of its year; launch/requirements-host.txt covers it.
    if host.origin.startswith(f"package {PACKAGE}") or not requirements.is_file():
        return 0
    missing = missing_requirements(requirements)
    if not missing:
        return 0
    print(f"Installing what the ComfyUI in {host.root} asks for: {', '.join(missing)} ...", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        for name in sorted(_CHOSEN_BY_SETUP):
            constraints.write(f"{name}=={importlib.metadata.version(name)}\n")
        constraints.flush()
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        return subprocess.run([*command, "--constraint", constraints.name, *missing], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
