"""A rank that does not come up is named, and says itself where it hangs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from phase_parallel.launch.ports import free_port
from phase_parallel.launch.readiness import ReadinessWatch
from phase_parallel.launch.records import LaunchRecord, RankEntry

HANGS = """
from phase_parallel.launch.rank import write_stacks_on_request
write_stacks_on_request()
def hangs_here():
    print("hangs", flush=True)
    input()
hangs_here()
"""


def test_a_rank_that_does_not_answer_is_asked_where_it_is(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdin=-1, stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "hangs\n"
    (tmp_path / "rank0.json").write_text(json.dumps({"pid": process.pid, "restart": 0}))
    received: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        entry = RankEntry(0, free_port())
        record = LaunchRecord(1, 1, "id", "", "", str(tmp_path), "", "cpu", "http://127.0.0.1", ranks=[entry])
        watch = ReadinessWatch(record, print, urls=[f"http://127.0.0.1:{entry.port}"], timeout_s=0.1)
        watch.start()
        watch.join(20)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert watch.failure is not None and watch.failure.startswith("Rank 0 did not answer within 0 s of its start")
    assert received == [signal.SIGTERM], "the agent is told to stop"
    _, written = process.communicate("\n", timeout=20)
    assert " in hangs_here" in written
