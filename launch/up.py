"""`phase-parallel up`: check everything, start the ranks, stay until they end, leave nothing behind."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ..parallel import environment as names
from ..parallel.plan import PlanError, PlanName
from ..parallel.plan_choice import plan_on_machines
from .errors import LaunchError
from .find_host import find_host
from .host import (
    ComfyHost,
    RankPlace,
    make_base,
    patched_user_folder,
    rank_arguments,
    rank_environment,
    reachable_address,
    split_extra_flags,
    write_model_paths,
)
from .parent import Parent
from .paths import PACK_ROOT, STATE_FOLDER, make_run_folder
from .ports import choose_ports
from .records import (
    LaunchRecord,
    RankEntry,
    live_records,
    logs_of,
    only_launch_in,
    process_birth,
    remove_record,
)

MAXIMUM_RANKS = 64
DEFAULT_CPU_RANKS = 4

# What loopback-only traffic between processes of one machine needs; a value that the user set stays.
_COLLECTIVE_DEFAULTS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # NVLink multicast (NVLS) hangs or fails where the fabric manager is not set up for it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class UpOptions:
    """What the user asked for; None means "choose"."""

    ranks: int | None = None
    plan: PlanName | None = None
    device: str = "auto"
    port: int | None = None
    models: tuple[Path, ...] = ()
    base: Path | None = None
    restarts: int = 3
    comfy_flags: list[str] = field(default_factory=list)
    parent: Parent | None = None


class Stopped(BaseException):
    """A signal arrived before the agent took over the handling of signals."""


def say(line: str) -> None:
    print(f"[phase-parallel] {line}", flush=True)


def up(options: UpOptions) -> int:
    """Exit code: 0 after Ctrl-C or SIGTERM, 1 when the ranks failed. Raises LaunchError before anything is
    started.
    """
    if options.parent is not None:
        options.parent.end_with_it()
    for wanted in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(wanted, _raise_stopped)
    try:
        host = find_host(say, comfy_dir=os.environ.get("COMFYUI_DIR"))
        first_flags, other_flags = split_extra_flags(host, options.comfy_flags)
        models = check_models(options.models)
        lock_folder, base = _base_of(host, options.base)
        with only_launch_in(lock_folder):
            live_records()  # removes what a killed launch left behind
            device, world_size = choose_device(options.device, options.ranks)
            check_plan(options.plan, world_size, world_size)
            ports = choose_ports(world_size, options.port)
            make_base(host, base, PACK_ROOT)
            url = f"http://{reachable_address(first_flags)}:{ports[0]}"
            record = _make_record(host, base, device, ports, url)
            try:
                return _run(host, record, options, models, (first_flags, other_flags))
            finally:
                remove_record(record)
    except Stopped:
        return 0
    finally:
        if options.parent is not None:
            options.parent.tidy_up()


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    raise Stopped(signum)


def check_models(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """--model folders as absolute paths. Raises LaunchError for one that is not there."""
    for folder in folders:
        if not folder.is_dir():
            raise LaunchError(
                f"--model {folder} is not a folder; name a checkpoint folder, or one that holds some."
            )
    return tuple(folder.resolve() for folder in folders)


def _base_of(host: ComfyHost, asked: Path | None) -> tuple[Path, Path]:
    """(folder whose lock this launch holds, base folder of the ranks)."""
    if host.in_place:
        if asked is not None:
            raise LaunchError(
                f"--base cannot be used with the ComfyUI in {host.root}, which holds this pack itself and "
                "keeps its own folders; leave --base out, or unset COMFYUI_DIR."
            )
        return STATE_FOLDER, host.root
    base = (asked or STATE_FOLDER / "base").resolve()
    return base, base


def choose_device(asked: str, ranks: int | None) -> tuple[str, int]:
    """Device type and number of ranks. Raises LaunchError when this machine has too few devices."""
    if ranks is not None and not 1 <= ranks <= MAXIMUM_RANKS:
        raise LaunchError(f"--ranks {ranks} is not possible; choose 1 to {MAXIMUM_RANKS}.")
    if asked == "cpu":
        return "cpu", ranks or DEFAULT_CPU_RANKS
    import torch  # takes seconds: not before it is needed

    found = torch.cuda.device_count()
    if asked == "auto" and not found:
        return "cpu", ranks or DEFAULT_CPU_RANKS
    if ranks is None and found:
        return "cuda", min(found, MAXIMUM_RANKS)
    if not found or (ranks or 1) > found:
        raise LaunchError(
            f"{ranks or 1} ranks need {ranks or 1} CUDA devices, but {found} can be used; "
            "choose fewer with --ranks, or --device cpu."
        )
    return "cuda", ranks or found


def check_plan(name: PlanName | None, world_size: int, machine_ranks: int) -> None:
    """Raises LaunchError for a plan that so many ranks cannot follow."""
    if name is not None:
        try:
            plan_on_machines(name, world_size=world_size, machine_ranks=machine_ranks)
        except PlanError as error:
            raise LaunchError(f"--plan {name} is not possible with {world_size} ranks: {error}.") from None


def _make_record(host: ComfyHost, base: Path, device: str, ports: tuple[int, ...], url: str) -> LaunchRecord:
    born = process_birth(os.getpid())
    assert born is not None
    record = LaunchRecord(
        pid=os.getpid(),
        born=born,
        launch_id=secrets.token_hex(8),
        checkout=str(PACK_ROOT),
        base=str(base),
        run_folder=str(make_run_folder()),
        comfyui=f"{host.version} ({host.origin})",
        device=device,
        url=url,
        ranks=[RankEntry(rank, port) for rank, port in enumerate(ports)],
    )
    record.write()
    return record


def _run(
    host: ComfyHost,
    record: LaunchRecord,
    options: UpOptions,
    models: tuple[Path, ...],
    flags: tuple[list[str], list[str]],
) -> int:
    from .agent import LoopbackStore, run_ranks
    from .readiness import ReadinessWatch

    store = LoopbackStore()
    # The secret travels in the environment alone: a command line is visible to every user of the machine.
    os.environ.update(launch_environment(record, store.port, options.plan, models, secrets.token_hex(32)))
    run_folder = Path(record.run_folder)
    plan = run_folder / "plan.json"
    plan.write_text(json.dumps(rank_instructions(host, record, flags)))
    say(f"Starting {len(record.ranks)} ranks on {record.device} in ComfyUI {record.comfyui}")
    urls = [record.url] + [f"http://127.0.0.1:{entry.port}" for entry in record.ranks[1:]]
    watch = ReadinessWatch(record, say, urls=urls)
    watch.start()
    outcome = run_ranks(
        world_size=len(record.ranks),
        launch_id=record.launch_id,
        store_port=store.port,
        plan=plan,
        logs=logs_of(record),
        restarts=options.restarts,
        is_ready=lambda: record.state == "ready",
        on_failure=say,
    )
    _ignore_signals()  # nothing may interrupt the clean-up now
    watch.stop()
    if watch.failure is not None:
        raise LaunchError(watch.failure)
    if outcome.signal is not None:
        say(f"Stopped ({outcome.signal.name}).")
        return 0
    if outcome.log_tail:
        print(outcome.log_tail, file=sys.stderr)
    who = "The launch" if outcome.rank is None else f"Rank {outcome.rank}"
    raise LaunchError(f"{who} {outcome.cause}; all ranks were stopped. Its last lines are above.")


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for wanted in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(wanted, signal.SIG_IGN)


def launch_environment(
    record: LaunchRecord, store_port: int, plan: PlanName | None, models: tuple[Path, ...], secret: str
) -> dict[str, str]:
    """The variables that all ranks share; torchrun's agent adds RANK, WORLD_SIZE and LOCAL_RANK."""
    world_size = len(record.ranks)
    threads = max(1, (os.cpu_count() or 1) // world_size)
    shared = {key: value for key, value in _COLLECTIVE_DEFAULTS.items() if key not in os.environ}
    if "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(threads)
    if models:
        # A folder that the user already exported stays selectable.
        known = [word for word in os.environ.get(names.MODEL_DIRS, "").split(os.pathsep) if word]
        shared[names.MODEL_DIRS] = os.pathsep.join([*map(str, models), *known])
    return shared | {
        names.STORE: f"127.0.0.1:{store_port}",
        names.SECRET: secret,
        names.LAUNCH_ID: record.launch_id,
        names.PORTS: ",".join(str(entry.port) for entry in record.ranks),
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
    for entry in record.ranks:
        own = run_folder / f"rank{entry.rank}"
        for name in ("user", "output"):
            (own / name).mkdir(parents=True)
        place = RankPlace(entry.rank, entry.port, record.device, own, base)
        user = patched_user_folder(host, place)
        extra = flags[0] if entry.rank == 0 else flags[1]
        ranks.append(
            {
                "arguments": rank_arguments(host, place, extra, model_paths),
                "environment": {
                    names.PORT: str(entry.port),
                    **rank_environment(host),
                },
                "user_folder": None if user is None else str(user),
            }
        )
    return {
        "agent_pid": os.getpid(),
        "run_folder": str(run_folder),
        "device": record.device,
        "script": str(host.root / "main.py"),
        "ranks": ranks,
    }
