"""Everything that differs between ComfyUI versions, so that no other module asks for one.

Three hosts are known to work: the current one (0.26), 0.3.64 and one of March 2024. A version number is never
compared: a host is asked for its flags, and what it does not know is done another way or left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import LaunchError

PACK_LINK_NAME = "ComfyUI-PhaseParallel"
MODEL_FOLDER_TYPE = "hunyuan_image_3"

# Decided by the launcher for each rank; a value from the command line would break the ranks' agreement.
OWNED_FLAGS = {
    "--port": "use `up --port`",
    "--base-directory": "use `up --base`",
    "--cpu": "use `up --device cpu`",
    "--cuda-malloc": "graphs and peers' memory need PyTorch's own allocator",
    "--cuda-device": "choose devices with CUDA_VISIBLE_DEVICES",
    "--default-device": "choose devices with CUDA_VISIBLE_DEVICES",
    "--temp-directory": "every rank has its own",
    "--user-directory": "every rank has its own; use `up --base`",
    "--database-url": "every rank has its own",
    "--quick-test-for-ci": "it ends ComfyUI at once",
    "--tls-keyfile": "put a TLS proxy in front of rank 0",
    "--tls-certfile": "put a TLS proxy in front of rank 0",
}

# What concerns the person in front of the browser goes to rank 0 and nowhere else.
RANK0_FLAGS = frozenset(
    {
        "--auto-launch",
        "--disable-all-custom-nodes",
        "--enable-assets",
        "--enable-compress-response-body",
        "--enable-cors-header",
        "--enable-manager",
        "--enable-manager-legacy-ui",
        "--front-end-root",
        "--front-end-version",
        "--listen",
        "--max-upload-size",
        "--multi-user",
        "--output-directory",
        "--whitelist-custom-nodes",
    }
)

_CHECK_ARGUMENTS = "import comfy.options as o; o.enable_args_parsing(); import comfy.cli_args"


@dataclass(frozen=True)
class ComfyHost:
    """One ComfyUI on disk.

    root: the folder of main.py.  origin: how it was found, as a person would say it.
    private: a copy of our own, so its folders may be written to.
    linked_as: the name under which root/custom_nodes already holds this pack, else None.
    """

    root: Path
    origin: str
    private: bool
    linked_as: str | None
    version: str
    flags: frozenset[str]

    def knows(self, flag: str) -> bool:
        return flag in self.flags

    @property
    def in_place(self) -> bool:
        return self.linked_as is not None


@dataclass(frozen=True)
class RankPlace:
    """Where one rank lives: its own folder in the run folder, the shared base folder, port, device type, and the address that a worker
    listens on.
    """

    rank: int
    port: int
    device: str
    own: Path
    base: Path
    address: str = "127.0.0.1"


def is_comfyui(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("main.py", "server.py", "nodes.py"))


def describe_host(root: Path, *, origin: str, private: bool, pack_root: Path) -> ComfyHost:
    """Ask the ComfyUI in `root` what it is. Raises LaunchError when it does not even answer --help."""
    return ComfyHost(
        root=root,
        origin=origin,
        private=private,
        linked_as=_name_in_custom_nodes(root, pack_root),
        version=_version(root),
        flags=_flags(root),
    )


def _name_in_custom_nodes(root: Path, pack_root: Path) -> str | None:
    folder = root / "custom_nodes"
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return next((entry.name for entry in entries if entry.resolve() == pack_root), None)


def _version(root: Path) -> str:
    for name in ("comfyui_version.py", "pyproject.toml"):
        path = root / name
        found = path.is_file() and re.search(
            r'^(?:__)?version(?:__)?\s*=\s*"([^"]+)"', path.read_text(), re.M
        )
        if found:
            return found[1]
    return "older than 0.3"  # those name no version


def _ask(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A wide, colourless help text has one flag a line; -B keeps our question from leaving byte code behind.
    env = {**os.environ, "COLUMNS": "1000", "NO_COLOR": "1"}
    command = [sys.executable, "-B", *arguments]
    return subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@lru_cache(maxsize=8)
def _flags(root: Path) -> frozenset[str]:
    answer = _ask(root, "main.py", "--help")
    found = frozenset(re.findall(r"^\s+(?:-\w, )?(--[a-z0-9-]+)", answer.stdout, re.M))
    if answer.returncode != 0 or "--port" not in found:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        raise LaunchError(
            f"The ComfyUI in {root} does not answer `main.py --help` ({last}); "
            f"install its requirements.txt for {sys.executable} and try again."
        )
    return found


def split_extra_flags(host: ComfyHost, extra: list[str]) -> tuple[list[str], list[str]]:
    """Check what stands after `--` and divide it: (for rank 0, for the other ranks).

    Raises LaunchError, before any rank starts, for a flag that we own, that the host lacks or refuses.
    """
    groups: list[list[str]] = []
    for word in extra:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            groups.append([name, value] if equals else [name])
        elif groups:
            groups[-1].append(word)
        else:
            raise LaunchError(f"{word!r} after `--` is not a ComfyUI flag; ComfyUI flags start with `--`.")
    for name, *_ in groups:
        if name in OWNED_FLAGS:
            raise LaunchError(f"{name} cannot be given to ComfyUI here: {OWNED_FLAGS[name]}.")
        if not host.knows(name):
            raise LaunchError(
                f"The ComfyUI in {host.root} ({host.version}) has no flag {name}; leave it out."
            )
    answer = _ask(host.root, "-c", _CHECK_ARGUMENTS, *(word for group in groups for word in group))
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise LaunchError(f"ComfyUI refuses its flags: {reason.partition('error: ')[2] or reason}.")
    first = [word for group in groups for word in group]
    others = [word for group in groups if group[0] not in RANK0_FLAGS for word in group]
    return first, others


def reachable_address(rank0_flags: list[str]) -> str:
    """The address at which rank 0 answers this machine, given the flags that the user added."""
    if "--listen" not in rank0_flags:
        return "127.0.0.1"
    following = rank0_flags[rank0_flags.index("--listen") + 1 :]
    addresses = following[0].split(",") if following and not following[0].startswith("--") else ["0.0.0.0"]
    local = any(
        address in ("0.0.0.0", "::", "localhost") or address.startswith("127.") for address in addresses
    )
    return "127.0.0.1" if local else addresses[0]


def make_base(host: ComfyHost, base: Path, pack_root: Path) -> None:
    """Create the folders that the ranks share, with the pack linked in; nothing for a host used in place."""
    if host.in_place:
        return
    for name in ("custom_nodes", "input", "output", "user", f"models/{MODEL_FOLDER_TYPE}"):
        (base / name).mkdir(parents=True, exist_ok=True)
    link = base / "custom_nodes" / PACK_LINK_NAME
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise LaunchError(f"{link} is not a link of ours; move it away or choose another folder with --base.")
    link.symlink_to(pack_root, target_is_directory=True)


def write_model_paths(host: ComfyHost, base: Path, target: Path) -> Path | None:
    """Write the extra-model-paths file: where this host finds the pack and models that its own folders lack.

    JSON is YAML, so nothing needs to be installed to write it.
    """
    if host.in_place:
        return None
    folders: dict[str, str] = {}
    if not host.private and host.knows("--base-directory"):
        models = host.root / "models"
        found = sorted(path for path in models.iterdir() if path.is_dir()) if models.is_dir() else []
        folders |= {path.name: str(path) for path in found}
    if not host.knows("--base-directory"):
        folders |= {
            "custom_nodes": str(base / "custom_nodes"),
            MODEL_FOLDER_TYPE: str(base / "models" / MODEL_FOLDER_TYPE),
        }
    if not folders:
        return None
    target.write_text(json.dumps({"phase_parallel": folders}, indent=1))
    return target


def rank_arguments(
    host: ComfyHost, place: RankPlace, extra: list[str], model_paths: Path | None
) -> list[str]:
    """The command line of one rank's ComfyUI. What a rank writes is its own; input and models are shared."""
    first = place.rank == 0
    words = ["--port", str(place.port), "--temp-directory", str(place.own)]
    if not (first and "--listen" in extra):
        words += ["--listen", "127.0.0.1" if first else place.address]
    if place.device == "cpu":
        words += ["--cpu"]
    elif host.knows("--disable-cuda-malloc"):
        # Text is written by CUDA graphs and sums go through peers' memory: both are made and tested with PyTorch's own allocator.
        words += ["--disable-cuda-malloc"]
    if not host.in_place and host.knows("--base-directory"):
        words += ["--base-directory", str(place.base)]
    elif not host.in_place:
        words += ["--input-directory", str(place.base / "input")]
    if model_paths is not None:
        words += ["--extra-model-paths-config", str(model_paths)]
    if not first:
        words += ["--output-directory", str(place.own / "output"), "--dont-print-server"]
        words += _only_this_pack(host)
    elif not host.in_place:
        words += ["--output-directory", str(place.base / "output")]
    user = user_folder(host, place)
    if user is not None and host.knows("--user-directory"):
        words += ["--user-directory", str(user)]
    if user is not None and host.knows("--database-url"):
        words += ["--database-url", f"sqlite:///{user / 'comfyui.db'}"]
    return words + extra


def _only_this_pack(host: ComfyHost) -> list[str]:
    """A worker executes one node of ours: other packs would only cost it time and memory."""
    words = ["--disable-api-nodes"] if host.knows("--disable-api-nodes") else []
    if host.knows("--whitelist-custom-nodes"):
        words += ["--disable-all-custom-nodes", "--whitelist-custom-nodes", host.linked_as or PACK_LINK_NAME]
    return words


def user_folder(host: ComfyHost, place: RankPlace) -> Path | None:
    """The user folder of a rank; None where the host's own is right (rank 0 of a host used in place)."""
    if place.rank == 0:
        return None if host.in_place else place.base / "user"
    return place.own / "user"


def patched_user_folder(host: ComfyHost, place: RankPlace) -> Path | None:
    """For hosts without --user-directory: the folder that rank.py puts into folder_paths beforehand."""
    return None if host.knows("--user-directory") else user_folder(host, place)


def rank_environment(host: ComfyHost) -> dict[str, str]:
    """Variables that keep a ComfyUI that is not ours free of our byte code."""
    if host.private or host.in_place:
        return {}
    # A prefix for byte code would hide what is there already: every start would compile all of torch again.
    return {"PYTHONDONTWRITEBYTECODE": "1"}
