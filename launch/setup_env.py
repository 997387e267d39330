"""Make .venv in the checkout: torch, what ComfyUI imports, test tools, this pack. Standard library only.

Run by the Makefile with the user's Python, before anything is installed: `python3 launch/setup_env.py
--device cpu`. A second run finds the stamp of the first and does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "phase_parallel_setup.json"
REQUIREMENTS = ROOT / "launch"
OLDEST_PYTHON = (3, 11)


class SetupError(RuntimeError):
    """One sentence: what failed and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--any-python", action="store_true", help="keep an environment of another Python")
    options = parser.parse_args()
    try:
        if sys.version_info < OLDEST_PYTHON:
            raise SetupError(
                f"Python {sys.version.split()[0]} is too old; choose 3.11 or newer, "
                "as in `make test PYTHON=python3.12`."
            )
        set_up(device=options.device, any_python=options.any_python)
        # In the new environment: find or obtain a ComfyUI, and install what that very version asks for.
        return subprocess.run(
            [PYTHON, "-m", "phase_parallel.launch.install_host"], cwd=ROOT, check=False
        ).returncode
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1


def torch_version() -> str | None:
    """Version of the torch that the invoking Python already has (not imported: that takes seconds)."""
    if importlib.util.find_spec("torch") is None:
        return None
    return importlib.metadata.version("torch")


def set_up(*, device: str, any_python: bool) -> None:
    """Bring .venv to what the requirement files say.

    On a machine with GPUs the installed torch fits its driver and the one from PyPI may not. So for cuda
    .venv is made to see the invoking Python's packages, and no second torch is installed.
    any_python: an environment that another Python made (an earlier `make test PYTHON=...`) will do.
    """
    present = json.loads(STAMP.read_text()) if STAMP.is_file() and can_run() else {}
    reuse_torch = present.get("reuse_torch", False) or (device == "cuda" and torch_version() is not None)
    base = {"checkout": str(ROOT), "reuse_torch": reuse_torch}
    maker = {"python": list(sys.version_info[:2]), "made_by": sys.executable}
    needed = base if any_python else base | maker
    requirements = requirements_digest()
    if any(present.get(key) != value for key, value in needed.items()):
        make_environment(reuse_torch)
        present = base | maker
    elif present["requirements"] == requirements:
        return
    print(
        "Installing into .venv what tests and demo need (6 GB and some minutes the first time) ...",
        flush=True,
    )
    install_torch(reuse_torch)
    pip("-r", "requirements-host.txt", "-r", "requirements-dev.txt")
    pip("--no-deps", "--editable", str(ROOT))
    STAMP.write_text(json.dumps(present | {"requirements": requirements}))


def can_run() -> bool:
    """False when the Python that .venv was made from has gone."""
    try:
        return subprocess.run([PYTHON, "-c", ""], check=False).returncode == 0
    except OSError:
        return False


def requirements_digest() -> str:
    digest = hashlib.sha256()
    for file in [ROOT / "pyproject.toml", *sorted(REQUIREMENTS.glob("requirements-*.txt"))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def make_environment(reuse_torch: bool) -> None:
    STAMP.unlink(missing_ok=True)
    builder = venv.EnvBuilder(clear=True, with_pip=True, symlinks=True, system_site_packages=reuse_torch)
    try:
        builder.create(ENVIRONMENT)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SetupError(
            f"{sys.executable} could not make an environment in {ENVIRONMENT} ({error}); "
            "on Debian install python3-venv."
        ) from error
    if reuse_torch and not sees("torch"):
        # Made from inside another environment, .venv would see that one's base and not its packages.
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.origin is not None
        where = subprocess.check_output(
            [PYTHON, "-c", "import site; print(site.getsitepackages()[0])"], text=True
        )
        Path(where.strip(), "invoking_environment.pth").write_text(f"{Path(spec.origin).parent.parent}\n")


def sees(module: str) -> bool:
    question = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([PYTHON, "-c", question], check=False).returncode == 0


def install_torch(reuse_torch: bool) -> None:
    if not reuse_torch:
        pip("-r", "requirements-torch.txt")
    elif not sees("torchvision"):
        version = torch_version()
        assert version is not None
        minor = int(version.split(".")[1])
        pip("--no-deps", f"torchvision==0.{minor + 15}.*")  # torch 2.x goes with torchvision 0.(x + 15)
    if not sees("torchaudio"):
        pip("--no-deps", "-r", "requirements-torchaudio.txt")


def pip(*arguments: str) -> None:
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    # Requirement files are named relative to their folder.
    done = subprocess.run(command, cwd=REQUIREMENTS, env={**os.environ, "PYTHONNOUSERSITE": "1"}, check=False)
    if done.returncode != 0:
        raise SetupError(
            f"pip could not install {' '.join(arguments)}; its reason is above. Run the same again later."
        )


if __name__ == "__main__":
    sys.exit(main())
