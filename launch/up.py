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
from typing import TYPE_CHECKING

from ..parallel.plan import PlanError, PlanName
from ..parallel.plan_choice import plan_on_machines
from .errors import LaunchError
from .find_host import find_host
from .gpus import gpus_for
from .host import ComfyHost, make_base, reachable_address, split_extra_flags
from .instructions import launch_environment, rank_instructions
from .machines import Machines, Meeting, read_machines
from .parent import Parent
from .paths import PACK_ROOT, STATE_FOLDER, make_run_folder
from .ports import choose_ports, worker_ports
from .records import (
    LaunchRecord,
    RankEntry,
    live_records,
    logs_of,
    only_launch_in,
    process_birth,
    remove_record,
    web_address,
)
from .shipped_models import complete_folder

if TYPE_CHECKING:
    from .agent import Outcome  # imports torch, which takes seconds

MAXIMUM_RANKS = 64
DEFAULT_CPU_RANKS = 4
DEFAULT_RESTARTS = 3

@dataclass(frozen=True)
class UpOptions:
    """What the user asked for; None means "choose"."""

    ranks: int | None = None
    plan: PlanName | None = None
    device: str = "auto"
    port: int | None = None
    models: tuple[Path, ...] = ()
    base: Path | None = None
    restarts: int | None = None
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    node_rank: int | None = None
    secret_file: Path | None = None
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
        machines = read_machines(options.nnodes, options.rdzv_endpoint, options.node_rank, options.secret_file)
        restarts = check_restarts(options.restarts, machines)
        host = find_host(say, comfy_dir=os.environ.get("COMFYUI_DIR"))
        first_flags, other_flags = split_extra_flags(host, options.comfy_flags)
        models = check_models(options.models)
        lock_folder, base = _base_of(host, options.base)
        with only_launch_in(lock_folder):
            live_records()  # removes what a killed launch left behind
            device, ranks = choose_device(options.device, options.ranks)
            check_plan(options.plan, ranks * options.nnodes, ranks)
            ports = _own_ports(ranks, options.port, machines)
            make_base(host, base, PACK_ROOT)
            meeting = _meet(machines, ports, device, options.plan)
            url = web_address(reachable_address(first_flags) if meeting.number == 0 else meeting.shown_at, meeting.ports[0])
            record = _make_record(host, base, device, meeting, ports, url)
            try:
                return _run(host, record, options, meeting, restarts, models, (first_flags, other_flags))
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
    return tuple(complete_folder(folder).resolve() for folder in folders)


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
    found = gpus_for(ranks or 1)
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
    """Raises LaunchError for a plan that so many ranks cannot follow, or not on their machines."""
    if name is not None:
        try:
            plan_on_machines(name, world_size=world_size, machine_ranks=machine_ranks)
        except PlanError as error:
            raise LaunchError(f"--plan {name} is not possible with {world_size} ranks: {error}.") from None


def check_restarts(asked: int | None, machines: Machines | None) -> int:
    """Raises LaunchError where restarts were asked for and cannot be had."""
    if machines is None:
        return DEFAULT_RESTARTS if asked is None else asked
    if asked:
        raise LaunchError(
            f"--restarts {asked} works on one machine only; with --nnodes a lost rank ends the launch on all machines, start `up` there again."
        )
    return 0


def _own_ports(ranks: int, asked: int | None, machines: Machines | None) -> tuple[int, ...]:
    """Ports of this machine's ranks."""
    if machines is None:
        return choose_ports(ranks, asked)
    if machines.number == 0:
        return choose_ports(ranks, asked, machines.address)
    if asked is not None:
        raise LaunchError("--port is of the ComfyUI to open, which runs on machine 0; leave it out here.")
    return tuple(worker_ports(ranks, machines.address))


def _meet(machines: Machines | None, ports: tuple[int, ...], device: str, plan: PlanName | None) -> Meeting:
    """The launch's store, and what the other machines have told there."""
    from .agent import LaunchStore
    from .meeting import meet_at_store, this_member

    launch_id = secrets.token_hex(8)
    if machines is None:
        store = LaunchStore()
        return Meeting(launch_id, "127.0.0.1", store.port, ports, secrets.token_hex(32), server=store)
    say(machines.sentence())
    try:
        server = LaunchStore(machines.address, machines.port) if machines.number == 0 else None
    except OSError as error:
        raise LaunchError(f"The store cannot listen on {machines.address}:{machines.port} ({error}); choose another port in --rdzv-endpoint.") from None
    say(f"Waiting for the other machines at {machines.host}:{machines.port}")
    return meet_at_store(machines, this_member(machines, launch_id=launch_id, ports=ports, device=device, plan=plan), server)


def _make_record(host: ComfyHost, base: Path, device: str, meeting: Meeting, ports: tuple[int, ...], url: str) -> LaunchRecord:
    born = process_birth(os.getpid())
    assert born is not None
    record = LaunchRecord(
        pid=os.getpid(),
        born=born,
        launch_id=meeting.launch_id,
        checkout=str(PACK_ROOT),
        base=str(base),
        run_folder=str(make_run_folder()),
        comfyui=f"{host.version} ({host.origin})",
        device=device,
        url=url,
        ranks=[RankEntry(meeting.number * len(ports) + place, port, address=meeting.address) for place, port in enumerate(ports)],
    )
    record.write()
    return record


def _run(
    host: ComfyHost,
    record: LaunchRecord,
    options: UpOptions,
    meeting: Meeting,
    restarts: int,
    models: tuple[Path, ...],
    flags: tuple[list[str], list[str]],
) -> int:
    from .agent import AgentPlace, run_ranks
    from .readiness import ReadinessWatch

    # The secret travels in the environment alone: a command line is visible to every user of the machine.
    os.environ.update(launch_environment(record, meeting, options.plan, models, meeting.secret))
    instructions = Path(record.run_folder) / "plan.json"
    instructions.write_text(json.dumps(rank_instructions(host, record, flags)))
    say(f"Starting {len(record.ranks)} ranks on {record.device} in ComfyUI {record.comfyui}")
    elsewhere = meeting.watch
    watch = ReadinessWatch(record, say, urls={entry.rank: entry.url(record) for entry in record.ranks}, elsewhere=elsewhere)
    watch.start()
    if elsewhere is not None:
        elsewhere.start()
    outcome = run_ranks(
        ranks=len(record.ranks),
        launch_id=record.launch_id,
        place=AgentPlace(meeting.store_host, meeting.store_port, meeting.number, meeting.count, meeting.address),
        plan=instructions,
        logs=logs_of(record),
        restarts=restarts,
        is_ready=lambda: record.state == "ready",
        on_failure=say,
    )
    _ignore_signals()  # nothing may interrupt the clean-up now
    watch.stop()
    failure = watch.failure or (elsewhere.failure if elsewhere is not None else None) or _failure_of(outcome)
    if elsewhere is not None:
        elsewhere.end(failure or "it was stopped")
    if failure is not None:
        if outcome.log_tail:
            print(outcome.log_tail, file=sys.stderr)
        raise LaunchError(failure)
    assert outcome.signal is not None
    say(f"Stopped ({outcome.signal.name}).")
    return 0


def _failure_of(outcome: Outcome) -> str | None:
    if outcome.signal is not None:
        return None
    who = "The launch" if outcome.rank is None else f"Rank {outcome.rank}"
    return f"{who} {outcome.cause}; all ranks were stopped. Its last lines are above."


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for wanted in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(wanted, signal.SIG_IGN)
