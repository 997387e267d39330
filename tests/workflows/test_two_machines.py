"""One picture by two launchers of this machine that are told to be two machines: each writes the text, both share the picture."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from graph_runs import GOLDEN, graph_of
from server_client import Client

from phase_parallel.launch.http_json import Refused, get_json
from phase_parallel.launch.paths import PACK_ROOT
from phase_parallel.launch.ports import free_port
from phase_parallel.launch.records import LaunchRecord, read_record

pytestmark = [pytest.mark.host, pytest.mark.timeout(900)]
START_S = 300.0


@contextmanager
def machine(number: int, endpoint: str, folder: Path) -> Iterator[subprocess.Popen]:
    place = ["--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", endpoint, "--base", str(folder / f"base{number}")]
    options = ["--ranks", "1", "--device", "cpu", "--model", str(GOLDEN / "checkpoints"), *place]
    env = {**os.environ, "PHASE_PARALLEL_SECRET": "the secret of two machines"}
    with (folder / f"log{number}.txt").open("wb") as log:
        process = subprocess.Popen([sys.executable, str(PACK_ROOT / "__main__.py"), "up", *options], env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
        process.terminate()
        process.wait(20)
    finally:
        process.kill()
        process.wait()


def ready(process: subprocess.Popen, log: Path) -> LaunchRecord:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        record = read_record(process.pid)
        if record is not None and record.state == "ready":
            return record
        time.sleep(0.2)
    raise AssertionError(f"not ready\n{log.read_text()[-4000:]}")


def test_two_machines_draw_one_picture(tmp_path: Path) -> None:
    endpoint = f"127.0.0.2:{free_port()}"
    with ExitStack() as stack:
        processes = [stack.enter_context(machine(number, endpoint, tmp_path)) for number in (0, 1)]
        records = [ready(process, tmp_path / f"log{number}.txt") for number, process in enumerate(processes)]
        client = Client(records[0].url)
        run = client.run(graph_of("t2i_generate", "tiny-base", {"HunyuanImage3Generate": {"steps": 2}}))
        assert run.error is None, run.error
        assert client.picture(run)[0].std() > 0
        status = get_json(records[0].url + "/phase_parallel/status")
        first, second = status["ranks"]
        assert status["plan"] == "replicated: AR TP1 on each of 2 replicas · denoise TP1×CFG2"
        assert first["digest"] == second["digest"] != ""
        assert (first["groups"], second["groups"]) == ({"AR": {}, "denoise": {"CFG": [0, 2]}}, {"AR": {}, "denoise": {"CFG": [1, 2]}})
        with pytest.raises(Refused, match="403"):
            get_json(records[1].ranks[0].url(records[1]) + "/history")
