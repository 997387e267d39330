"""The machines of a launch find one another: machine 0 serves the store, and each tells there what the others must know.

The launch's secret does not travel. Each user brings it to each machine, and only proofs of it are compared.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..parallel import environment as names
from ..parallel.plan import PlanName
from ..parallel.store import JsonStore, StoreTimeout, StoreUnreachable
from .errors import LaunchError
from .machine_watch import MachineWatch
from .machines import Machines, Meeting

JOIN_S = 600.0
"""How long a machine waits for the others: people start them one after the other."""


@dataclass(frozen=True)
class Member:
    """What the machines tell one another. ``proof``: of the secret, worthless for another launch."""

    token: str
    launch_id: str
    address: str
    ports: tuple[int, ...]
    device: str
    plan: PlanName | None
    host: str
    boot: str
    proof: str = ""


def meet_at_store(machines: Machines, mine: Member, server: object | None) -> Meeting:
    """Raises LaunchError as ``meet``."""
    store = JsonStore.tcp(machines.host, machines.port, "machines")
    members = meet(machines, store, mine)
    launch_id = members[0].launch_id
    return Meeting(
        launch_id=launch_id,
        store_host=machines.host,
        store_port=machines.port,
        ports=ports_of(members),
        secret=machines.secret,
        addresses=addresses_of(members),
        shown_at=members[0].address,
        number=machines.number,
        count=machines.count,
        address=machines.address,
        interface=machines.interface,
        watch=MachineWatch(machines.number, machines.count, store, launch_id),
        server=server,
    )


def meet(machines: Machines, store: JsonStore, mine: Member, *, limit_s: float = JOIN_S) -> list[Member]:
    """All machines' members by number, once every one has come. All of them have ``launch_id`` of machine 0 then.

    Raises LaunchError when one does not come, or does not belong to this launch.
    """
    deadline = time.monotonic() + limit_s
    at = f"{machines.host}:{machines.port}"
    launch_id = _first_id(machines, store, mine.launch_id, deadline)
    mine = replace(mine, launch_id=launch_id, proof=proof_of(machines.secret, launch_id, machines.number))
    standing = store.set_first(f"{launch_id}/machine/{machines.number}", asdict(mine))
    if standing["token"] != mine.token:
        raise LaunchError(f"Another launcher is machine {machines.number} at {at} already; give each machine a --node-rank of its own.")
    keys = [f"{launch_id}/machine/{number}" for number in range(machines.count)]
    try:
        found = store.collect(keys, max(deadline - time.monotonic(), 0.1), lambda: None)
    except StoreTimeout as error:
        missing = ", ".join(key.rpartition("/")[2] for key in error.missing)
        raise LaunchError(f"Machine {missing} did not come to {at} within {limit_s:.0f} s; start `up` there too, with its --node-rank.") from None
    except RuntimeError:  # as the store's client reports a server that is gone
        raise LaunchError(f"Machine 0 at {at} has ended; start `up` on all machines again.") from None
    members = [Member(**{**value, "ports": tuple(value["ports"])}) for value in found]
    for number, member in enumerate(members):
        _check_member(machines, mine, number, member)
    return members


def _first_id(machines: Machines, store: JsonStore, own: str, deadline: float) -> str:
    """Machine 0's launch id; another machine may have been started first and waits for machine 0 here."""
    while True:
        try:
            if machines.number == 0:
                return store.set_first("launch", own)
            found = store.find("launch")
            if found is not None:
                return str(found)
        except StoreUnreachable:
            pass
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Machine 0 does not answer at {machines.host}:{machines.port}; start `up` there with --node-rank 0, or correct --rdzv-endpoint."
            )
        time.sleep(0.5)


def _check_member(machines: Machines, mine: Member, number: int, member: Member) -> None:
    who = f"Machine {number} ({member.host})"
    if not hmac.compare_digest(member.proof, proof_of(machines.secret, member.launch_id, number)):
        raise LaunchError(f"{who} was started with another secret; give all machines the same {names.SECRET} or --secret-file.")
    for what, ours, theirs in (
        ("--ranks", len(mine.ports), len(member.ports)),
        ("--device", mine.device, member.device),
        ("--plan", mine.plan or "auto", member.plan or "auto"),
    ):
        if ours != theirs:
            raise LaunchError(f"{who} has {what} {theirs} but this machine has {ours}; start all machines with the same options.")
    if member.host == mine.host and member.boot != mine.boot:
        raise LaunchError(f"{who} has the host name of machine {machines.number}; ranks are told apart by it, give the machines names of their own.")


def proof_of(secret: str, launch_id: str, number: int) -> str:
    return hmac.new(secret.encode(), f"{launch_id} machine {number}".encode(), hashlib.sha256).hexdigest()


def this_member(machines: Machines, *, launch_id: str, ports: tuple[int, ...], device: str, plan: PlanName | None) -> Member:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Member(uuid.uuid4().hex, launch_id, machines.address, ports, device, plan, socket.gethostname(), boot)


def addresses_of(members: list[Member]) -> tuple[str, ...]:
    """Where each rank listens; rank 0, which is for a browser on its own machine, on loopback as ever."""
    listed = [member.address for member in members for _ in member.ports]
    return ("127.0.0.1", *listed[1:])


def ports_of(members: list[Member]) -> tuple[int, ...]:
    return tuple(port for member in members for port in member.ports)
