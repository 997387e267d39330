from __future__ import annotations

import socket

import pytest

from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.ports import choose_ports, free_port, is_free


def test_ports_are_free_and_different() -> None:
    ports = choose_ports(8, None)
    assert len(set(ports)) == 8 and all(is_free(port) for port in ports)


def test_an_asked_port_is_taken_literally_or_refused() -> None:
    port = free_port()
    assert choose_ports(1, port) == (port,)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen(1)
        with pytest.raises(LaunchError, match=f"Port {port} is in use .*; stop the program"):
            choose_ports(1, port)
    with pytest.raises(LaunchError, match="not a TCP port"):
        choose_ports(1, 70000)


def test_the_usual_port_is_left_to_whoever_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        usual = taken.getsockname()[1]
        monkeypatch.setattr("phase_parallel.launch.ports.COMFYUI_PORT", usual)
        (chosen,) = choose_ports(1, None)
        assert chosen > usual
