"""Which network interface leads to another machine. Standard library only."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915


def address_of(host: str, port: int) -> str:
    """``host`` as a number. Raises OSError when nobody knows it."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]


def address_towards(host: str, port: int) -> str:
    """Address of this machine on its way to ``host``, as the kernel routes; nothing is sent. Raises OSError where there is no way."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """Name of the interface that has ``address``; every 127.* belongs to the loopback. Raises OSError when none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 6:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            if ipaddress.IPv6Address(bytes.fromhex(number)) == wanted:
                return name
        raise OSError(f"no network interface has the address {address}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if ipaddress.IPv4Address(answer[20:24]) == wanted:
                return name
    raise OSError(f"no network interface has the address {address}")
