"""What the sockets of a process listen on."""

from __future__ import annotations

import os
from pathlib import Path


def listening(pids: list[int]) -> list[tuple[str, bool]]:
    """(address as the kernel writes it, whether only this machine reaches it) of every TCP socket that these processes listen on."""
    sockets = set()
    for pid in pids:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.exists()]
        sockets |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                found.append((f"{table} {words[1]}", words[1].split(":")[0] == loopback))
    return found
