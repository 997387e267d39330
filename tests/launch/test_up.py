"""`phase-parallel up` as a user runs it, with real processes under the elastic agent and a stand-in for
ComfyUI.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from loopback import listening

from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.http_json import get_json
from phase_parallel.launch.paths import PACK_ROOT, runtime_folder
from phase_parallel.launch.ports import free_port
from phase_parallel.launch.records import LaunchRecord, process_birth, read_record, remove_record
from phase_parallel.launch.running import Launch, what_is_left
from phase_parallel.parallel.hung_ranks import HungRank, ask_to_end
from phase_parallel.parallel.store import JsonStore

from .conftest import tree_of

UP = [sys.executable, str(PACK_ROOT / "__main__.py"), "up", "--device", "cpu"]


def run_up(*options: str, comfyui: Path) -> subprocess.CompletedProcess[str]:
    """Run `up` where it must end by itself."""
    env = {**os.environ, "COMFYUI_DIR": str(comfyui)}
    return subprocess.run([*UP, *options], env=env, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def started(
    *options: str, comfyui: Path, base: Path, script: str = ""
) -> Iterator[tuple[subprocess.Popen, LaunchRecord]]:
    """A ready launch that the test ends itself; killed at the end if it did not."""
    env = {**os.environ, "COMFYUI_DIR": str(comfyui), "STUB_SCRIPT": script}
    command = [*UP, "--port", str(free_port()), "--base", str(base), *options]
    with (base.parent / "up.txt").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        record = wait_for(process, restarts=0)
        yield process, record
        process.terminate()
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    # What a test killed cannot tidy up after itself.
    remove_record(record)


def wait_for(process: subprocess.Popen, *, restarts: int) -> LaunchRecord:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        record = read_record(process.pid)
        if record is not None and record.state == "ready" and record.restarts == restarts:
            return record
        time.sleep(0.1)
    raise AssertionError("the launch did not become ready")


def wait_until_gone(record: LaunchRecord, seconds: float = 10.0) -> list[str]:
    deadline = time.monotonic() + seconds
    while what_is_left(record) and time.monotonic() < deadline:
        time.sleep(0.1)
    return what_is_left(record)


def test_ranks_start_and_leave_nothing_behind(
    any_stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    before = tree_of(any_stand_in)
    model = tmp_path / "checkpoint"
    model.mkdir()
    said: list[str] = []
    with Launch(
        ranks=3,
        models=[model],
        plan="tp",
        comfy_flags=["--preview-method", "auto"],
        environment={"COMFYUI_DIR": str(any_stand_in)},
        announce=said.append,
    ) as launch:
        answers = [get_json(url + "/system_stats") for url in launch.urls]
        launch_pid, record = launch.pid, launch.record
        assert launch.log.count("[rank 2] argv") == 1
        check_environments([answer["environment"] for answer in answers], record, model)
        for answer in answers:
            assert answer["cwd"] == str(any_stand_in)
            assert "--preview-method" in answer["argv"]
        check_secret_is_on_no_command_line(
            launch_pid, record, answers[0]["environment"]["PHASE_PARALLEL_SECRET"]
        )
        check_only_loopback_listens([launch_pid, *(entry.pid for entry in record.ranks)])
    # Looked at afterwards: the launch is ready before its last lines have been read.
    assert said.index(f"Ready: {record.url}") == max(said.index(line) for line in said if " is ready on port " in line) + 1
    assert what_is_left(record) == []
    assert not launch.folder.exists() and list(runtime_folder().iterdir()) == []
    assert tree_of(any_stand_in) == before, "a user's ComfyUI must stay as it was"


def check_environments(found: list[dict[str, str]], record: LaunchRecord, model: Path) -> None:
    ports = [str(entry.port) for entry in record.ranks]
    assert [each["PHASE_PARALLEL_PORT"] for each in found] == ports
    for name, value in (
        ("PHASE_PARALLEL_PORTS", ",".join(ports)),
        ("PHASE_PARALLEL_LAUNCH_ID", record.launch_id),
        ("PHASE_PARALLEL_DEVICE", "cpu"),
        ("PHASE_PARALLEL_MODEL_DIRS", str(model)),
        ("PHASE_PARALLEL_PLAN", "tp"),
        ("GLOO_SOCKET_IFNAME", "lo"),
    ):
        assert {each[name] for each in found} == {value}
    assert len({each["PHASE_PARALLEL_STORE"] for each in found}) == 1
    assert len(found[0]["PHASE_PARALLEL_SECRET"]) == 64


def check_secret_is_on_no_command_line(launch_pid: int, record: LaunchRecord, secret: str) -> None:
    for pid in (launch_pid, *(entry.pid for entry in record.ranks)):
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for file in Path(record.run_folder).rglob("*.json"):
        assert secret not in file.read_text()


def check_only_loopback_listens(pids: list[int | None]) -> None:
    """No TCP socket of these processes listens on an address that another machine can reach."""
    found = listening([pid for pid in pids if pid is not None])
    assert len(found) >= len(pids), "each rank and the store listen"
    assert all(local for _, local in found), found


def test_the_launch_package_of_any_folder_name_is_found_by_path(tmp_path: Path) -> None:
    link = tmp_path / "odd name.1"
    link.symlink_to(PACK_ROOT)
    done = subprocess.run(
        [sys.executable, "-I", str(link), "status"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_second_launch_in_the_same_folder_is_refused(stand_in: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    with started("--ranks", "1", comfyui=stand_in, base=base) as (first, record):
        second = run_up("--ranks", "1", "--base", str(base), comfyui=stand_in)
        assert second.returncode == 1
        assert f"Another launch (process {first.pid}) already runs in {base}" in second.stderr
        assert "Traceback" not in second.stderr
        # A killed launch must not leave a lock, a rank or a port.
        first.kill()
        first.wait()
        assert [left for left in wait_until_gone(record) if left.startswith(("process", "port"))] == []
    with started("--ranks", "1", comfyui=stand_in, base=base):
        assert not Path(record.run_folder).exists(), "the next launch tidies up after a killed one"


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["Ctrl-C", "SIGTERM", "SIGHUP"])
def test_a_stop_takes_everything_down(stand_in: Path, tmp_path: Path, stop: signal.Signals) -> None:
    with started("--ranks", "2", comfyui=stand_in, base=tmp_path / "base") as (process, record):
        process.send_signal(stop)
        assert process.wait(10) == 0
        assert what_is_left(record) == []


def test_a_rank_writes_its_stacks_to_its_log_when_asked(stand_in: Path) -> None:
    with Launch(ranks=1, environment={"COMFYUI_DIR": str(stand_in)}) as launch:
        os.kill(launch.record.ranks[0].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while "serve_forever" not in launch.log and time.monotonic() < deadline:
            time.sleep(0.1)
        assert get_json(launch.url + "/system_stats"), "the rank goes on"
        assert any(line.startswith("[rank 0] ") and " in serve_forever" in line for line in launch.log.splitlines())


def test_a_killed_rank_brings_all_ranks_back(stand_in: Path, tmp_path: Path) -> None:
    options = ("--ranks", "2", "--restarts", "1")
    with started(*options, comfyui=stand_in, base=tmp_path / "base") as (process, record):
        os.kill(record.ranks[1].pid, signal.SIGKILL)
        again = wait_for(process, restarts=1)
        for old, new in zip(record.ranks, again.ranks, strict=True):
            assert process_birth(old.pid) is None and process_birth(new.pid) is not None
            assert old.port == new.port
        assert get_json(again.url + "/system_stats")["restart"] == "1"
        os.kill(again.ranks[0].pid, signal.SIGKILL)
        assert process.wait(20) == 1
        assert what_is_left(again) == []
    log = (tmp_path / "up.txt").read_text()
    assert "Rank 1 was killed by SIGKILL: all ranks are started again." in log
    assert "phase-parallel: Rank 0 was killed by SIGKILL; all ranks were stopped." in log


def test_a_rank_that_hangs_is_ended_when_rank_0_asks_and_nothing_else(stand_in: Path, tmp_path: Path) -> None:
    options = ("--ranks", "2", "--restarts", "1")
    with (
        subprocess.Popen(["sleep", "60"]) as stranger,
        started(*options, comfyui=stand_in, base=tmp_path / "base") as (process, record),
    ):
        os.kill(record.ranks[1].pid, signal.SIGSTOP)
        told = get_json(record.url + "/system_stats")["environment"]
        host, _, port = told["PHASE_PARALLEL_STORE"].rpartition(":")
        store = JsonStore.tcp(host, int(port), told["PHASE_PARALLEL_LAUNCH_ID"])
        ask_to_end(store, [HungRank(0, stranger.pid, 5.0), HungRank(1, record.ranks[1].pid, 5.0)])
        again = wait_for(process, restarts=1)
        assert process_birth(record.ranks[1].pid) is None and process_birth(again.ranks[1].pid) is not None
        assert stranger.poll() is None, "the launcher ends its own ranks only"
        stranger.kill()
        time.sleep(1)
        assert process.poll() is None and get_json(again.url + "/system_stats")["restart"] == "1", "what was asked of the former ranks is over"
    log = (tmp_path / "up.txt").read_text()
    assert log.count("did not answer for") == 1 and f"Rank 1 did not answer for 5 s: its process {record.ranks[1].pid} is ended." in log
    assert "Rank 1 was killed by SIGKILL: all ranks are started again." in log


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("fail at start", "Rank 1 ended with exit code 1; all ranks were stopped"),
        ("end", "Rank 1 ended with exit code 3; all ranks were stopped"),
        ("no pack", "could not load this pack"),
    ],
)
def test_ranks_that_never_become_ready_are_not_tried_again(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, sentence: str
) -> None:
    monkeypatch.setenv("STUB_SCRIPT", script)
    done = run_up("--ranks", "2", "--base", str(tmp_path / "base"), comfyui=stand_in)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "started again" not in done.stdout
    if script == "fail at start":
        assert "rank 1 of the stand-in fails at its start" in done.stderr
    assert list(runtime_folder().iterdir()) == []


def test_bad_requests_end_before_any_rank_starts(stand_in: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        for options, sentence in (
            (["--port", port], f"Port {port} is in use"),
            (["--ranks", "0"], "--ranks 0 is not possible"),
            (["--node-rank", "1"], "--rdzv-endpoint, --node-rank and --secret-file are for several machines; add --nnodes 2 or more"),
            (["--ranks", "3", "--plan", "hybrid"], "--plan hybrid is not possible with 3 ranks: plan hybrid needs an even number of ranks"),
            (["--ranks", "2", "--plan", "single"], "--plan single is not possible with 2 ranks: plan single uses 1 rank"),
            (["--model", str(tmp_path / "none")], "is not a folder"),
            (["--", "--bogus"], "has no flag --bogus"),
            (["--device", "cuda", "--ranks", "64"], "64 ranks need 64 CUDA devices"),
        ):
            done = run_up("--base", str(tmp_path / "base"), *options, comfyui=stand_in)
            assert done.returncode == 1 and sentence in done.stderr, done.stderr
            assert "Traceback" not in done.stderr and "Starting" not in done.stdout


def test_a_launch_ends_with_the_process_that_made_it(stand_in: Path) -> None:
    program = (
        "import time\nfrom phase_parallel.launch.running import Launch\n"
        "with Launch(ranks=1) as launch:\n    print(launch.pid, flush=True)\n    time.sleep(60)\n"
    )
    env = {**os.environ, "COMFYUI_DIR": str(stand_in)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        record = read_record(int(maker.stdout.readline()))
        maker.kill()
    assert record is not None
    assert wait_until_gone(record) == []
    assert not Path(record.base).parent.exists(), "the folder of the killed process"


def test_launch_reports_a_failed_start(stand_in: Path) -> None:
    environment = {"COMFYUI_DIR": str(stand_in), "STUB_SCRIPT": "fail at start"}
    launch = Launch(ranks=2, environment=environment)
    with pytest.raises(LaunchError, match="fails at its start"), launch:
        pass
    assert not launch.folder.exists()


def test_a_comfyui_that_holds_the_pack_is_used_in_place(stand_in: Path, tmp_path: Path) -> None:
    (stand_in / "custom_nodes").mkdir()
    (stand_in / "custom_nodes" / "my copy").symlink_to(PACK_ROOT)
    refused = run_up("--base", str(tmp_path / "base"), comfyui=stand_in)
    assert refused.returncode == 1 and "--base cannot be used" in refused.stderr
    with Launch(ranks=2, environment={"COMFYUI_DIR": str(stand_in)}) as launch:
        first, second = (get_json(url + "/system_stats")["argv"] for url in launch.urls)
    assert "--base-directory" not in first and "--user-directory" not in first
    assert str(launch.output_folder) in first and str(launch.output_folder) not in second
    assert second[second.index("--whitelist-custom-nodes") + 1] == "my copy"
