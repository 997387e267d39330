"""What `up` writes down for its ranks: the variables that all share, and what each one becomes."""

from __future__ import annotations

import os
from pathlib import Path

from ..parallel import environment as names
from ..parallel.plan import PlanName
from .gpus import gpu_of
from .host import ComfyHost, RankPlace, patched_user_folder, rank_arguments, rank_environment, write_model_paths
from .machines import Meeting
from .records import LaunchRecord, logs_of

# Traffic of one machine's ranks stays on loopback, that of several takes the way to the store; a value that the user set stays.
_INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_COLLECTIVE_DEFAULTS = {
    # NVLink multicast (NVLS) hangs or fails where the fabric manager is not set up for it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def launch_environment(
    record: LaunchRecord, meeting: Meeting, plan: PlanName | None, models: tuple[Path, ...], secret: str
) -> dict[str, str]:
    """The variables that this machine's ranks share; torchrun's agent adds RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""
    threads = max(1, (os.cpu_count() or 1) // len(record.ranks))
    defaults = {**dict.fromkeys(_INTERFACE_NAMES, meeting.interface), **_COLLECTIVE_DEFAULTS}
    shared = {key: value for key, value in defaults.items() if key not in os.environ}
    if "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(threads)
    if models:
        # A folder that the user already exported stays selectable.
        known = [word for word in os.environ.get(names.MODEL_DIRS, "").split(os.pathsep) if word]
        shared[names.MODEL_DIRS] = os.pathsep.join([*map(str, models), *known])
    return shared | {
        names.STORE: f"{meeting.store_host}:{meeting.store_port}",
        names.SECRET: secret,
        names.LAUNCH_ID: record.launch_id,
        names.PORTS: ",".join(map(str, meeting.ports)),
        names.ADDRESSES: ",".join(meeting.addresses),
        names.DEVICE: record.device,
        names.LOGS: str(logs_of(record)),
        names.PLAN: plan or "",
    }


def rank_instructions(host: ComfyHost, record: LaunchRecord, flags: tuple[list[str], list[str]]) -> dict[str, object]:
    """What rank.py reads: the script to become, and each rank's arguments and variables. Makes the ranks'
    folders.
    """
    run_folder, base = Path(record.run_folder), Path(record.base)
    model_paths = write_model_paths(host, base, run_folder / "model_paths.yaml")
    ranks = []
    for local_rank, entry in enumerate(record.ranks):
        own = run_folder / f"rank{entry.rank}"
        for name in ("user", "output"):
            (own / name).mkdir(parents=True)
        place = RankPlace(entry.rank, entry.port, record.device, own, base, entry.address)
        user = patched_user_folder(host, place)
        extra = flags[0] if entry.rank == 0 else flags[1]
        ranks.append(
            {
                "arguments": rank_arguments(host, place, extra, model_paths),
                "environment": {
                    names.PORT: str(entry.port),
                    **({"CUDA_VISIBLE_DEVICES": gpu_of(local_rank)} if record.device == "cuda" else {}),
                    **rank_environment(host),
                },
                "user_folder": None if user is None else str(user),
            }
        )
    return {
        "agent_pid": os.getpid(),
        "run_folder": str(run_folder),
        "script": str(host.root / "main.py"),
        "ranks": ranks,
    }
