"""Several machines, as launchers of this one with numbers of their own, on an address of the loopback that single launches never use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from loopback import listening

from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.http_json import get_json
from phase_parallel.launch.interfaces import interface_of
from phase_parallel.launch.machines import Machines, read_machines
from phase_parallel.launch.paths import PACK_ROOT
from phase_parallel.launch.ports import free_port
from phase_parallel.launch.records import LaunchRecord, read_record, remove_record
from phase_parallel.launch.running import what_is_left
from phase_parallel.launch.up import check_restarts

ADDRESS = "127.0.0.2"
SECRET = "a secret of these machines"
GONE_S = 10.0


@dataclass
class Machine:
    """One launcher. ``log`` is what it wrote."""

    process: subprocess.Popen
    file: Path

    @property
    def log(self) -> str:
        return self.file.read_text()

    def ready(self) -> LaunchRecord:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            record = read_record(self.process.pid)
            if record is not None and record.state == "ready":
                return record
            time.sleep(0.1)
        raise AssertionError(f"not ready\n{self.log}")

    def ends(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds} s\n{self.log}") from None


@contextmanager
def machine(number: int, port: int, stand_in: Path, folder: Path, *options: str, secret: str = SECRET, ranks: int = 2) -> Iterator[Machine]:
    place = ["--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", f"{ADDRESS}:{port}"]
    command = [sys.executable, str(PACK_ROOT / "__main__.py"), "up", "--device", "cpu", "--ranks", str(ranks), *place, *options]
    env = {**os.environ, "COMFYUI_DIR": str(stand_in), "PHASE_PARALLEL_SECRET": secret}
    own = folder / f"machine{number}-{secret[:3]}-{ranks}"
    own.mkdir()
    log = own / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--base", str(own / "base")], env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield Machine(process, log)
    finally:
        process.kill()
        process.wait()


@contextmanager
def two(stand_in: Path, folder: Path) -> Iterator[tuple[list[Machine], list[LaunchRecord]]]:
    """Both ready; machine 1 is started first."""
    port = free_port()
    with ExitStack() as stack:
        second = stack.enter_context(machine(1, port, stand_in, folder))
        time.sleep(1.0)
        first = stack.enter_context(machine(0, port, stand_in, folder, "--port", str(free_port())))
        machines = [first, second]
        records = [each.ready() for each in machines]
        try:
            yield machines, records
        finally:
            for each in machines:
                each.process.terminate()
            for each, record in zip(machines, records, strict=True):
                each.process.wait(20)
                remove_record(record)


def test_two_machines_are_one_launch(stand_in: Path, tmp_path: Path) -> None:
    with two(stand_in, tmp_path) as (machines, records):
        assert [[entry.rank for entry in record.ranks] for record in records] == [[0, 1], [2, 3]]
        entries = [entry for record in records for entry in record.ranks]
        found = [get_json(entry.url(records[0]) + "/system_stats") for entry in entries]
        ports = ",".join(str(entry.port) for entry in entries)
        for answer, entry in zip(found, entries, strict=True):
            shared = answer["environment"]
            assert shared["PHASE_PARALLEL_PORTS"] == ports and shared["PHASE_PARALLEL_PORT"] == str(entry.port)
            assert shared["PHASE_PARALLEL_ADDRESSES"] == f"127.0.0.1,{ADDRESS},127.0.0.1,127.0.0.1"
            assert shared["PHASE_PARALLEL_SECRET"] == SECRET and shared["GLOO_SOCKET_IFNAME"] == "lo"
        assert len({answer["environment"]["PHASE_PARALLEL_STORE"] for answer in found}) == 1
        assert records[0].launch_id == records[1].launch_id
        says = "[phase-parallel] Machine 0 of 2: the store listens on 127.0.0.2:"
        assert machines[0].log.count(says) == 1 and "[phase-parallel] Machine 1 of 2: its workers listen on 127.0.0.1" in machines[1].log
        only_given_addresses_listen([machine.process.pid for machine in machines], [entry.pid for entry in entries])
        machines[0].process.send_signal(signal.SIGINT)
        assert machines[0].ends(GONE_S) == 0
        assert machines[1].ends(GONE_S) == 1
        assert "All ranks of this machine were stopped: machine 0 " in machines[1].log and "Traceback" not in machines[1].log
        assert [what_is_left(record) for record in records] == [[], []]


def only_given_addresses_listen(launchers: list[int], ranks: list[int | None]) -> None:
    given = {"0100007F", "0200007F"}
    found = listening([pid for pid in (*launchers, *ranks) if pid is not None])
    assert {address.split()[1].split(":")[0] for address, _ in found} <= given, found


def test_a_lost_rank_ends_both(stand_in: Path, tmp_path: Path) -> None:
    with two(stand_in, tmp_path) as (machines, records):
        lost = records[1].ranks[1].pid
        assert lost is not None
        os.kill(lost, signal.SIGKILL)
        assert [each.ends(2 * GONE_S) for each in machines] == [1, 1]
        assert "Rank 3 was killed by SIGKILL; all ranks were stopped." in machines[1].log
        assert "machine 1 has ended (Rank 3 was killed by SIGKILL; all ranks were stopped" in machines[0].log


def test_a_killed_launcher_ends_the_other(stand_in: Path, tmp_path: Path) -> None:
    with two(stand_in, tmp_path) as (machines, records):
        machines[1].process.kill()
        assert machines[0].ends(GONE_S) == 1
        assert "All ranks of this machine were stopped: machine 1 has not answered for 6 s." in machines[0].log
        assert [left for left in what_is_left(records[1]) if left.startswith(("process", "port"))] == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"secret": "another secret, as long"}, "was started with another secret; give all machines the same PHASE_PARALLEL_SECRET"),
        ({"ranks": 1}, "has --ranks 1 but this machine has 2; start all machines with the same options."),
    ],
)
def test_machines_that_do_not_belong_together(stand_in: Path, tmp_path: Path, changes: dict, sentence: str) -> None:
    port = free_port()
    with machine(0, port, stand_in, tmp_path) as first, machine(1, port, stand_in, tmp_path, **changes) as second:
        assert [first.ends(30), second.ends(30)] == [1, 1]
        assert sentence in first.log
        assert "Starting" not in first.log + second.log and "Traceback" not in first.log + second.log


def test_two_machines_with_one_number(stand_in: Path, tmp_path: Path) -> None:
    port = free_port()
    with machine(0, port, stand_in, tmp_path) as first, machine(1, port, stand_in, tmp_path) as second:
        first.ready(), second.ready()
        with machine(1, port, stand_in, tmp_path, secret=SECRET[::-1]) as third:
            assert third.ends(30) == 1
            assert "Another launcher is machine 1 at 127.0.0.2:" in third.log
        assert first.process.poll() is None and second.process.poll() is None


def test_a_plan_across_machines_is_refused_before_anything_starts(stand_in: Path, tmp_path: Path) -> None:
    with machine(0, free_port(), stand_in, tmp_path, "--plan", "hybrid") as first:
        assert first.ends(30) == 1
        assert "--plan hybrid is not possible with 4 ranks: plan hybrid adds up the layers of prefill over ranks 0, 1, 2, 3" in first.log
        assert "Waiting" not in first.log


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((1, "h:1", None), "are for several machines; add --nnodes 2"),
        ((0, None, None), "--nnodes 0 is not possible; choose 1 to 64"),
        ((2, "h:1", None), "--nnodes 2 needs --node-rank 0 to 1"),
        ((2, "h:1", 2), "--nnodes 2 needs --node-rank 0 to 1"),
        ((2, None, 1), "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ((2, "h", 1), "--rdzv-endpoint h is not HOST:PORT"),
        ((2, "192.0.2.7:29400", 0), "192.0.2.7 is not this machine"),
        ((2, "no-such-host.invalid:29400", 1), "no-such-host.invalid cannot be reached from this machine"),
    ],
)
def test_options_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, arguments: tuple, sentence: str) -> None:
    monkeypatch.setenv("PHASE_PARALLEL_SECRET", SECRET)
    with pytest.raises(LaunchError) as caught:
        read_machines(*arguments, None)
    assert sentence in str(caught.value)


def test_where_the_secret_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PHASE_PARALLEL_SECRET", raising=False)
    place = (2, f"{ADDRESS}:1", 0)
    with pytest.raises(LaunchError, match="Several machines need one secret: set PHASE_PARALLEL_SECRET on each, or name a file"):
        read_machines(*place, None)
    file = tmp_path / "secret"
    with pytest.raises(LaunchError, match="cannot be read"):
        read_machines(*place, file)
    file.write_text("short\n")
    with pytest.raises(LaunchError, match="has 5 characters; it needs 16 or more"):
        read_machines(*place, file)
    file.write_text(SECRET + "\n")
    machines = read_machines(*place, file)
    assert machines is not None and (machines.secret, machines.address, machines.interface) == (SECRET, ADDRESS, "lo")


def test_restarts_are_for_one_machine() -> None:
    machines = Machines(2, 0, ADDRESS, 1, ADDRESS, "lo", SECRET)
    assert (check_restarts(None, None), check_restarts(5, None), check_restarts(None, machines), check_restarts(0, machines)) == (3, 5, 0, 0)
    with pytest.raises(LaunchError, match="--restarts 1 works on one machine only"):
        check_restarts(1, machines)


def test_an_address_that_no_interface_has() -> None:
    with pytest.raises(OSError, match=r"no network interface has the address 192\.0\.2\.7"):
        interface_of("192.0.2.7")
