"""One launch on several machines: `up` is started on each of them, and its options say which this one is. Imports no torch: options are
refused at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..parallel import environment as names
from .errors import LaunchError
from .interfaces import address_of, address_towards, interface_of
from .machine_watch import MachineWatch

MAXIMUM_MACHINES = 64


@dataclass(frozen=True)
class Machines:
    """This machine's place: number ``number`` of ``count``. ``address``: where the other machines reach it, on network ``interface``."""

    count: int
    number: int
    host: str
    port: int
    address: str
    interface: str
    secret: str

    def sentence(self) -> str:
        serves = f"the store listens on {self.address}:{self.port} and " if self.number == 0 else ""
        return (
            f"Machine {self.number} of {self.count}: {serves}its workers listen on {self.address}, which other machines reach. Workers answer "
            "nobody without the secret; the store has no password, so let only your machines reach that network."
        )


@dataclass(frozen=True)
class Meeting:
    """A launch that is about to start: where its store is, and all its ranks' doors. Without ``watch`` it has one machine."""

    launch_id: str
    store_host: str
    store_port: int
    ports: tuple[int, ...]
    secret: str
    addresses: tuple[str, ...] = ()
    shown_at: str = "127.0.0.1"
    """Address of machine 0."""
    number: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    interface: str = "lo"
    watch: MachineWatch | None = None
    server: object | None = None
    """Machine 0's store, which lives as long as somebody holds it."""


def read_machines(nnodes: int, endpoint: str | None, node_rank: int | None, secret_file: Path | None) -> Machines | None:
    """None for one machine. Raises LaunchError when options or the secret are missing or cannot be used."""
    if nnodes == 1:
        if endpoint is not None or node_rank not in (None, 0) or secret_file is not None:
            raise LaunchError("--rdzv-endpoint, --node-rank and --secret-file are for several machines; add --nnodes 2 or more.")
        return None
    if not 1 <= nnodes <= MAXIMUM_MACHINES:
        raise LaunchError(f"--nnodes {nnodes} is not possible; choose 1 to {MAXIMUM_MACHINES}.")
    if node_rank is None or not 0 <= node_rank < nnodes:
        raise LaunchError(f"--nnodes {nnodes} needs --node-rank 0 to {nnodes - 1}, another one on each machine; machine 0 shows ComfyUI.")
    host, port = _endpoint(endpoint, nnodes)
    secret = _read_secret(secret_file)
    try:
        address = address_of(host, port) if node_rank == 0 else address_towards(host, port)
        interface = interface_of(address)
    except OSError as error:
        what = "is not this machine" if node_rank == 0 else "cannot be reached from this machine"
        raise LaunchError(f"--rdzv-endpoint {endpoint}: {host} {what} ({error}); name an address of machine 0.") from None
    return Machines(nnodes, node_rank, host, port, address, interface, secret)


def _endpoint(text: str | None, nnodes: int) -> tuple[str, int]:
    host, _, port = (text or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        given = f"--rdzv-endpoint {text} is not HOST:PORT" if text else f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT"
        raise LaunchError(f"{given}; name an address of machine 0 and a free port there, the same on all machines.")
    return host.strip("[]"), int(port)


def _read_secret(file: Path | None) -> str:
    if file is not None:
        try:
            secret = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"--secret-file {file} cannot be read ({error}); write the launch's secret into it.") from None
        source = f"--secret-file {file}"
    else:
        secret, source = os.environ.get(names.SECRET, ""), names.SECRET
    if not secret:
        raise LaunchError(
            f"Several machines need one secret: set {names.SECRET} on each, or name a file with --secret-file; "
            "`openssl rand -hex 32` makes one."
        )
    if len(secret) < names.MINIMUM_SECRET_LENGTH:
        raise LaunchError(f"{source} has {len(secret)} characters; it needs {names.MINIMUM_SECRET_LENGTH} or more.")
    return secret
