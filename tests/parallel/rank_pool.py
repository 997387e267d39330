"""Rank processes for tests. The parent side starts them once and runs many scenarios in them; the child side
is a loop over stdin.

Starting four torch processes takes six seconds on two cores, a scenario takes milliseconds.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from phase_parallel.parallel.stacks import ask_for_stacks, write_stacks

_MARK = "@@reply "
_START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Reply:
    """What a scenario returned on one rank, or the error that it raised."""

    result: Any
    error_type: str
    error: str
    seconds: float


class RankPool:
    """N processes running ``program``, each a rank; the store lives in this process."""

    def __init__(
        self, program: Path, world_size: int, environment: Callable[[int, str], dict[str, str]] | None = None
    ):
        """``environment(rank, store address)``: variables that the program needs besides RANK, WORLD_SIZE and
        STORE.
        """
        import torch.distributed as dist

        self.world_size = world_size
        # wait_for_workers would count connections, and ranks open several.
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.store_address = f"127.0.0.1:{self._store.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._replies: Queue[tuple[int, dict]] = Queue()
        self.processes = [
            self._start(program, rank, environment(rank, self.store_address) if environment else {})
            for rank in range(world_size)
        ]
        # Importing torch four times takes long on a busy machine; that is not a scenario's time.
        self.collect(list(range(world_size)), _START_TIMEOUT_S)

    def _start(self, program: Path, rank: int, environment: dict[str, str]) -> subprocess.Popen:
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "STORE": self.store_address,
            "STACKS": str(self._stacks_of(rank)),
            "OMP_NUM_THREADS": "1",
            # As the launcher does: a machine's own name need not resolve.
            "GLOO_SOCKET_IFNAME": "lo",
        }
        process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own, **environment},
        )
        threading.Thread(target=self._read, args=(rank, process), daemon=True).start()
        return process

    def _read(self, rank: int, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_MARK):
                self._replies.put((rank, json.loads(line.removeprefix(_MARK))))

    def start(self, scenario: str, ranks: range | list[int] | None = None, **arguments: Any) -> list[int]:
        """Begin a scenario on ``ranks`` (all of them by default)."""
        wanted = list(ranks if ranks is not None else range(self.world_size))
        for rank in wanted:
            stdin = self.processes[rank].stdin
            assert stdin is not None
            stdin.write(json.dumps({"scenario": scenario, "arguments": arguments}) + "\n")
            stdin.flush()
        return wanted

    def collect(self, ranks: list[int], timeout_s: float) -> dict[int, Reply]:
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + timeout_s
        while len(replies) < len(ranks):
            try:
                rank, reply = self._replies.get(timeout=max(deadline - time.monotonic(), 0.0))
            except Empty:
                silent = sorted(set(ranks) - set(replies))
                for rank in silent:
                    ask_for_stacks(self.processes[rank].pid)
                time.sleep(0.5)
                stacks = "\n".join(f"rank {rank}:\n{self.stacks(rank)}" for rank in silent)
                raise AssertionError(f"ranks {silent} did not reply within {timeout_s} s\n{stacks}") from None
            replies[rank] = Reply(**reply)
        return replies

    def stacks(self, rank: int) -> str:
        """What a rank wrote about its threads, each time that it was asked."""
        path = self._stacks_of(rank)
        return path.read_text() if path.exists() else ""

    def _stacks_of(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stacks{rank}.txt"

    def run(self, scenario: str, *, timeout_s: float = 30.0, **arguments: Any) -> list[Reply]:
        """Run on all ranks; replies by rank."""
        replies = self.collect(self.start(scenario, **arguments), timeout_s)
        return [replies[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
        self._folder.cleanup()


def serve(scenarios: dict[str, Callable[..., Any]]) -> None:
    """Child side: run what the parent asks for until it hangs up."""
    stacks = open(os.environ["STACKS"], "w", encoding="utf-8")  # noqa: SIM115 - open for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks)
    logging.getLogger(write_stacks.__module__).addHandler(logging.StreamHandler(stacks))
    _reply(Reply("ready", "", "", 0.0))
    for line in sys.stdin:
        request = json.loads(line)
        start = time.monotonic()
        result, error_type, error = None, "", ""
        try:
            result = scenarios[request["scenario"]](**request["arguments"])
        except BaseException as raised:
            error_type, error = type(raised).__name__, str(raised)
            traceback.print_exc()
        _reply(Reply(result, error_type, error, time.monotonic() - start))


def _reply(reply: Reply) -> None:
    print(_MARK + json.dumps(asdict(reply)), flush=True)
