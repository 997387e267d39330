"""The words of the Ranks node and of `phase-parallel status`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from phase_parallel.nodes.node_ranks import describe_ranks
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.rank_record import RankRecord, RecordKeeper
from phase_parallel.parallel.rank_words import error_lines, memory_words, moment, phase_words, picture_words, place_words, text_words

GB = 10**9


def record(rank: int = 0, **changes: Any) -> dict[str, Any]:
    memory = {"resident_set": 2 * GB, "resident_peak": 3 * GB, "host_total": 24 * GB}
    return asdict(RankRecord(rank, 7, "here", "", "cpu", device_name="CPU", memory=memory)) | changes


def on_gpu(**changes: Any) -> dict[str, Any]:
    memory = record()["memory"] | {"device_allocated": 40 * GB, "device_reserved": 41 * GB, "device_peak": 52 * GB, "device_free": 90 * GB}
    return record(device="cuda:0", device_name="NVIDIA H200 (GPU 2)", memory=memory | {"device_total": 143 * GB}, **changes)


def status(*ranks: dict[str, Any] | None, silent: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"plan": "tp: AR TP2 · denoise TP2", "silent": list(silent), "ranks": list(ranks)}


def test_one_line_for_the_plan_each_rank_and_each_error() -> None:
    at = time.time()
    working = record(phase="denoise", done=3, total=50, s_per_step=1.5, steps=3, error="it broke", error_at=at)
    lines = describe_ranks(status(working, record(1, error="it broke", error_at=at - 5), None, silent=(1,))).splitlines()
    assert lines == [
        "tp: AR TP2 · denoise TP2",
        "rank 0: CPU; no place yet; denoise 3/50; 2.0 GB host memory (peak 3.0) of 24.0 GB; 3 steps, 1.50 s/step",
        "rank 1: CPU; no place yet; idle; 2.0 GB host memory (peak 3.0) of 24.0 GB; silent",
        "rank 2: not started; see its log or restart the launch",
        f"last error of rank 0, 1 at {moment(at)}: it broke",
    ]


def test_place_of_a_rank_in_every_phase() -> None:
    keeper = RecordKeeper(RankRecord(2, 1, "here", "", "cpu"))
    keeper.take_place(make_plan("hybrid", world_size=4, rank=2, denoise="cfg"), 1)
    assert place_words(keeper.to_json()) == "shard 0, replica 1; AR TP 1 of 4; denoise TP 0 of 2 × CFG 1 of 2"
    keeper.take_place(make_plan("single", world_size=1), 1)
    assert place_words(keeper.to_json()) == "shard 0, replica 0"


def test_memory_of_a_gpu() -> None:
    assert memory_words(on_gpu()) == "40.0 of 143.0 GB on the GPU (peak 52.0, 90.0 free), 2.0 GB host memory (peak 3.0)"
    assert "NVIDIA H200 (GPU 2)" in describe_ranks(status(on_gpu()))


def test_both_last_runs_are_kept_in_words() -> None:
    both = record(tokens=101, tokens_per_s=402.31, steps=50, s_per_step=0.5, text_path="one CUDA graph a token; process group: no peer memory")
    assert text_words(both) == "101 tokens, 402.3 tokens/s"
    assert picture_words(both) == "50 steps, 0.50 s/step"
    assert "101 tokens, 402.3 tokens/s (one CUDA graph a token; process group: no peer memory); 50 steps, 0.50 s/step" in describe_ranks(status(both))
    assert text_words(record(tokens=1)) == "1 token", "one token has no speed"
    assert (text_words(record()), picture_words(record()), phase_words(record())) == ("", "", "idle")


def test_errors_newest_first_with_their_day() -> None:
    old = record(0, error="old", error_at=0.0)
    new = record(1, error="new", error_at=time.time())
    first, second = error_lines([old, new])
    assert first.startswith("last error of rank 1 at ") and first.endswith(": new")
    assert second == f"last error of rank 0 at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(0))}: old"
