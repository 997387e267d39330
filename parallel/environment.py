"""What the launcher tells a rank through its environment. Every environment name of the pack lives in this
file.

A process without ``PHASE_PARALLEL_STORE`` was not started by our launcher and works alone. Imports the
standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .plan import PlanError, PlanName
from .plan_choice import plan_on_machines

STORE = "PHASE_PARALLEL_STORE"
SECRET = "PHASE_PARALLEL_SECRET"
LAUNCH_ID = "PHASE_PARALLEL_LAUNCH_ID"
PORT = "PHASE_PARALLEL_PORT"
PORTS = "PHASE_PARALLEL_PORTS"
ADDRESSES = "PHASE_PARALLEL_ADDRESSES"
"""Where each rank listens, comma-separated; left out where all are on one machine, on loopback."""

TIMEOUT_S = "PHASE_PARALLEL_TIMEOUT_S"
DEVICE = "PHASE_PARALLEL_DEVICE"
MODEL_DIRS = "PHASE_PARALLEL_MODEL_DIRS"
RANDOM_WEIGHTS = "PHASE_PARALLEL_RANDOM_WEIGHTS"
"""``allowed`` where a benchmark started the ranks: folders without weights may be loaded with random ones."""
SHARE_GPU = "PHASE_PARALLEL_SHARE_GPU"
"""``allowed``: there may be more ranks than GPUs, to try faults and programs where there are few. Needs an NCCL that takes it (2.30, with
NCCL_MULTI_RANK_GPU_ENABLE=1), and ranks on one GPU take turns: nothing is fast."""
LOGS = "PHASE_PARALLEL_LOGS"
PLAN = "PHASE_PARALLEL_PLAN"
"""What the loader's ``auto`` means in this launch; left out where it is to choose itself."""
RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Ranks of each machine; set by torchrun's elastic agent."""

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""Set by torchrun's elastic agent: ranks that were started again must not read what their dead predecessors
left in the store.
"""

DEFAULT_TIMEOUT_S = 60.0
DEVICES = ("cpu", "cuda")
MINIMUM_SECRET_LENGTH = 16


class EnvironmentProblem(ValueError):
    """A variable is missing or wrong; the message names it, its value and what it should be."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """One rank's place in a launch."""

    rank: int
    world_size: int
    local_rank: int
    store_host: str
    store_port: int
    secret: str
    launch_id: str
    ports: tuple[int, ...]
    """HTTP port of each rank's ComfyUI, by rank."""
    timeout_s: float
    device: str
    model_dirs: tuple[str, ...]
    restart_count: int
    logs: str = ""
    """Folder of what all ranks write; empty where the launcher keeps none."""
    plan: PlanName | None = None
    """What ``auto`` means in this launch; None: what fits the ranks and their memory."""
    machine_ranks: int = 0
    """Ranks of each machine; 0: all are on one."""
    addresses: tuple[str, ...] = ()
    """Address that each rank listens on; empty: all on loopback."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """None when the launcher did not start this process.

        Raises:
            EnvironmentProblem: a variable is missing, or its value cannot be used.
        """
        if not environ.get(STORE):
            return None
        host, store_port = _address(environ)
        world_size = _integer(environ, WORLD_SIZE, 1, 4096)
        rank = _integer(environ, RANK, 0, world_size - 1)
        machine_ranks = _integer(environ, LOCAL_WORLD_SIZE, 1, world_size, default=world_size)
        secret = _required(environ, SECRET)
        if len(secret) < MINIMUM_SECRET_LENGTH:
            raise EnvironmentProblem(
                f"{SECRET} has {len(secret)} characters; it needs {MINIMUM_SECRET_LENGTH} or more"
            )
        device = environ.get(DEVICE, "cpu")
        if device not in DEVICES:
            raise EnvironmentProblem(f"{DEVICE}={device!r} is not a device kind; use {' or '.join(DEVICES)}")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=_integer(environ, LOCAL_RANK, 0, world_size - 1, default=rank),
            store_host=host,
            store_port=store_port,
            secret=secret,
            launch_id=_required(environ, LAUNCH_ID),
            ports=_ports(environ, rank, world_size),
            timeout_s=_number(environ, TIMEOUT_S, float, 1.0, 86400.0, DEFAULT_TIMEOUT_S),
            device=device,
            model_dirs=tuple(part for part in environ.get(MODEL_DIRS, "").split(os.pathsep) if part),
            restart_count=_integer(environ, RESTART_COUNT, 0, 1 << 20, default=0),
            logs=environ.get(LOGS, ""),
            plan=_plan(environ, world_size, machine_ranks),
            machine_ranks=machine_ranks if machine_ranks < world_size else 0,
            addresses=_addresses(environ, world_size),
        )

    @property
    def port(self) -> int:
        return self.ports[self.rank]

    @property
    def store_prefix(self) -> str:
        """Every key of this launch lives below it."""
        return f"{self.launch_id}/{self.restart_count}"

    def url(self, rank: int) -> str:
        """Address of a rank's ComfyUI."""
        host = self.addresses[rank] if self.addresses else "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.ports[rank]}"

    def to_environ(self) -> dict[str, str]:
        """The variables that make ``from_environ`` return this object again; what the launcher exports."""
        return {
            STORE: f"{self.store_host}:{self.store_port}",
            SECRET: self.secret,
            LAUNCH_ID: self.launch_id,
            PORT: str(self.port),
            PORTS: ",".join(map(str, self.ports)),
            TIMEOUT_S: f"{self.timeout_s:g}",
            DEVICE: self.device,
            MODEL_DIRS: os.pathsep.join(self.model_dirs),
            RANK: str(self.rank),
            WORLD_SIZE: str(self.world_size),
            LOCAL_RANK: str(self.local_rank),
            RESTART_COUNT: str(self.restart_count),
            LOGS: self.logs,
            PLAN: self.plan or "",
            ADDRESSES: ",".join(self.addresses),
            LOCAL_WORLD_SIZE: str(self.machine_ranks or self.world_size),
        }


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise EnvironmentProblem(
            f"{name} is not set although {STORE} is; start the ranks with `phase-parallel up`"
        )
    return value


def _number(
    environ: Mapping[str, str], name: str, kind: Callable, low: float, high: float, default: float | None
) -> float:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    text = text or _required(environ, name)
    try:
        value = kind(text)
    except ValueError:
        raise EnvironmentProblem(
            f"{name}={text!r} is not a number; use one from {low:g} to {high:g}"
        ) from None
    if not low <= value <= high:
        raise EnvironmentProblem(f"{name}={text} is out of range; use a number from {low:g} to {high:g}")
    return value


def _integer(
    environ: Mapping[str, str], name: str, low: int, high: int, *, default: int | None = None
) -> int:
    return int(_number(environ, name, int, low, high, default))


def _plan(environ: Mapping[str, str], world_size: int, machine_ranks: int) -> PlanName | None:
    name = environ.get(PLAN, "")
    if not name:
        return None
    try:
        return plan_on_machines(name, world_size=world_size, machine_ranks=machine_ranks).name
    except PlanError as error:
        raise EnvironmentProblem(f"{PLAN}={name!r} cannot be used: {error}") from None


def _address(environ: Mapping[str, str]) -> tuple[str, int]:
    text = environ[STORE]
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise EnvironmentProblem(f"{STORE}={text!r} is not host:port, for example 127.0.0.1:29400")
    return host.strip("[]"), int(port)


def _addresses(environ: Mapping[str, str], world_size: int) -> tuple[str, ...]:
    addresses = tuple(part for part in environ.get(ADDRESSES, "").split(",") if part)
    if len(addresses) not in (0, world_size):
        raise EnvironmentProblem(
            f"{ADDRESSES} names {len(addresses)} addresses but {WORLD_SIZE} is {world_size}; name one per rank, or none"
        )
    return addresses


def _ports(environ: Mapping[str, str], rank: int, world_size: int) -> tuple[int, ...]:
    text = _required(environ, PORTS)
    parts = text.split(",")
    if not all(part.isdigit() and 0 < int(part) < 65536 for part in parts):
        raise EnvironmentProblem(f"{PORTS}={text!r} is not a comma-separated list of ports, one per rank")
    ports = tuple(map(int, parts))
    if len(ports) != world_size:
        raise EnvironmentProblem(
            f"{PORTS} names {len(ports)} ports but {WORLD_SIZE} is {world_size}; name one port per rank"
        )
    own = _integer(environ, PORT, 1, 65535)
    if ports[rank] != own:
        raise EnvironmentProblem(
            f"{PORT}={own} but {PORTS} gives rank {rank} port {ports[rank]}; the two must agree"
        )
    return ports
