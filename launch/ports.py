"""Choose TCP ports that are free now. Asked for and taken: a sentence. Not asked for: the next free one."""

from __future__ import annotations

import random
import socket

from .errors import LaunchError

COMFYUI_PORT = 8188
# Below Linux's ephemeral range (32768 and up): an outgoing connection cannot take a port between our look and
# the bind.
_WORKER_PORTS = range(20000, 32000)
_TRIES = 200


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    """True when a server could listen on address:port now (a connection in TIME_WAIT does not count as
    taken).
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose_ports(ranks: int, asked: int | None, address: str = "127.0.0.1") -> tuple[int, ...]:
    """One port per rank; rank 0 gets `asked`, else 8188 or the next free one. The others listen on `address`.

    Raises LaunchError when `asked` is taken or not a port that can be used.
    """
    if asked is None:
        candidates = range(COMFYUI_PORT, COMFYUI_PORT + _TRIES)
        first = next((port for port in candidates if is_free(port)), None)
        if first is None:
            raise LaunchError(
                f"No port from {COMFYUI_PORT} to {candidates[-1]} is free; choose one with --port."
            )
    elif not 1 <= asked <= 65535:
        raise LaunchError(f"--port {asked} is not a TCP port; choose one from 1024 to 65535.")
    elif not is_free(asked):
        raise LaunchError(
            f"Port {asked} is in use (or not allowed for this user); stop the program that has it, "
            "choose another with --port, or leave --port out to get a free one."
        )
    else:
        first = asked
    return (first, *worker_ports(ranks - 1, address, first))


def free_port() -> int:
    """A free port that a launch for tests or the demo can ask for."""
    return worker_ports(1)[0]


def worker_ports(count: int, address: str = "127.0.0.1", taken: int = 0) -> list[int]:
    """Free ports of ranks that only rank 0 talks to."""
    found: list[int] = []
    # A random order keeps two launches that start at the same moment from choosing the same ports.
    for port in random.SystemRandom().sample(_WORKER_PORTS, _TRIES + count):
        if len(found) == count:
            break
        if port != taken and is_free(port, address):
            found.append(port)
    if len(found) < count:
        raise LaunchError(
            f"Only {len(found)} of {count} free ports could be found; stop programs that hold many ports."
        )
    return found
