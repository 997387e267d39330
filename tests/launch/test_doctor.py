"""What doctor says of machines that are not at hand: the facts are made up, the judgement is real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phase_parallel.launch import doctor as module
from phase_parallel.launch.cli import main
from phase_parallel.launch.doctor import (
    Finding,
    doctor,
    judge_checkpoint,
    judge_devices,
    judge_room,
    judge_software,
)
from phase_parallel.launch.machine import Device, Machine, look_at_machine
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint

GB = 1_000_000_000
H200 = Device("H200", (9, 0), 150 * GB, 149 * GB)
GOOD = Machine(
    python=(3, 12),
    versions={"torch": "2.11.0+cu130", "safetensors": "1", "tokenizers": "1", "aiohttp": "1"},
    backends=frozenset({"gloo", "nccl"}),
    devices=(H200,) * 4,
    peers=((True,) * 4,) * 4,
    topology="",
    memory_available=200 * GB,
    shared_memory=64 * GB,
    disk_free={"this checkout": 100 * GB},
    cores=64,
)


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.verdict for finding in findings}


def test_nothing_blocks_a_good_machine() -> None:
    findings = judge_software(GOOD) + judge_devices(GOOD) + judge_room(GOOD)
    assert set(verdicts(findings).values()) == {"ok"}
    assert not any(finding.remedy for finding in findings)


@pytest.mark.parametrize(
    ("change", "judge", "subject", "verdict"),
    [
        ({"versions": {**GOOD.versions, "torch": "2.8.1"}}, judge_software, "torch", "FAIL"),
        ({"versions": {**GOOD.versions, "tokenizers": None}}, judge_software, "packages", "FAIL"),
        ({"backends": frozenset({"gloo"})}, judge_software, "communication", "FAIL"),
        ({"python": (3, 10)}, judge_software, "Python", "FAIL"),
        ({"devices": (replace(H200, capability=(7, 5)),) * 4}, judge_devices, "GPU 0", "FAIL"),
        ({"devices": (replace(H200, free=50 * GB),) * 4}, judge_devices, "GPU 3", "note"),
        ({"devices": ()}, judge_devices, "GPUs", "note"),
        ({"peers": ((True, True, True, False),) * 4}, judge_devices, "links", "note"),
        ({"shared_memory": 64 << 20}, judge_room, "/dev/shm", "FAIL"),
        ({"disk_free": {"this checkout": GB}}, judge_room, "disk", "FAIL"),
        ({"memory_available": GB}, judge_room, "host memory", "note"),
    ],
)
def test_each_trouble_is_named_with_a_remedy(change: dict, judge: object, subject: str, verdict: str) -> None:
    findings = [found for found in judge(replace(GOOD, **change)) if found.subject == subject]
    assert findings[0].verdict == verdict and findings[0].remedy


def test_missing_links_are_named() -> None:
    peers = ((True, True, False), (True, True, True), (False, True, True))
    machine = replace(GOOD, devices=(H200,) * 3, peers=peers)
    assert "0-2" in judge_devices(machine)[-1].text


def test_a_checkpoint_is_judged_and_its_plan_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, SyntheticSpec())
    complete, plan = judge_checkpoint(folder, GOOD)
    assert complete.verdict == plan.verdict == "ok" and "hybrid" in plan.text
    small = replace(GOOD, devices=(replace(H200, free=1000),) * 4)
    assert verdicts(judge_checkpoint(folder, small))["plan"] == "FAIL"
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    (found,) = judge_checkpoint(folder, GOOD)
    assert found.verdict == "FAIL" and shard.name in found.text
    shard.unlink()
    (found,) = judge_checkpoint(folder, GOOD)
    assert found.verdict == "FAIL" and shard.name in found.text


def test_doctor_runs_here_and_fails_for_what_blocks(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COMFYUI_DIR", str(stand_in))
    machine = look_at_machine()
    assert "gloo" in machine.backends and machine.cores >= 1
    monkeypatch.setattr(module, "look_at_machine", lambda: replace(GOOD, devices=(), peers=()))
    assert doctor(None) == 0
    assert "Start with: phase-parallel up --ranks 4" in capsys.readouterr().out
    assert main(["doctor", "--model", str(tmp_path / "absent")]) == 1
    out = capsys.readouterr().out
    assert "FAIL  checkpoint" in out and "Nothing blocks" not in out
    monkeypatch.setenv("COMFYUI_DIR", str(tmp_path))
    assert doctor(None) == 1
    assert "set COMFYUI_DIR to the folder of a ComfyUI" in capsys.readouterr().out
