"""`phase-parallel doctor`: look at the machine, the ComfyUI and a checkpoint, and say what to do."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import LaunchError
from .find_host import find_host
from .host import ComfyHost
from .install_host import missing_requirements
from .machine import Machine, look_at_machine
from .ports import COMFYUI_PORT, is_free
from .records import live_records
from .up import DEFAULT_CPU_RANKS

GB = 1e9
OLDEST_TORCH = (2, 9)
OLDEST_PYTHON = (3, 11)
# The smallest release needs sm_80's bf16 matrix units.
OLDEST_CAPABILITY = (8, 0)
# NCCL moves data of devices without a direct link through here, tens of MB for each pair; Docker gives 64 MB.
SHARED_MEMORY_NEEDED = 1 << 30
DISK_NEEDED = 2_000_000_000
# A ComfyUI process with torch, before any weight.
MEMORY_PER_RANK = 1_500_000_000

Verdict = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is repeated at the end; a FAIL blocks, a note does not."""

    verdict: Verdict
    subject: str
    text: str
    remedy: str = ""


def doctor(model: Path | None) -> int:
    """Prints the findings and what to do. Exit code: 1 when something blocks, else 0."""
    machine = look_at_machine()
    findings = judge_software(machine) + judge_host() + judge_devices(machine) + judge_room(machine)
    findings += judge_ports()
    if model is not None:
        findings += judge_checkpoint(model, machine)
    for finding in findings:
        print(f"{finding.verdict:<5} {finding.subject:<14} {finding.text}")
    if machine.topology:
        print(f"\nLinks as nvidia-smi sees them:\n{machine.topology}")
    remedies = [f"{finding.subject}: {finding.remedy}" for finding in findings if finding.remedy]
    blocked = any(finding.verdict == "FAIL" for finding in findings)
    print("\nWhat to do:")
    for number, remedy in enumerate(remedies, start=1):
        print(f"  {number}. {remedy}")
    if not blocked:
        ranks = len(machine.devices) or DEFAULT_CPU_RANKS
        print(f"  Nothing blocks. Start with: phase-parallel up --ranks {ranks}")
    return 1 if blocked else 0


def judge_software(machine: Machine) -> list[Finding]:
    shown = ", ".join(f"{name} {version or 'MISSING'}" for name, version in machine.versions.items())
    python = ".".join(map(str, machine.python))
    findings = [Finding("ok", "versions", f"Python {python}, {shown}")]
    if machine.python < OLDEST_PYTHON:
        findings.append(Finding("FAIL", "Python", f"{python} is too old", "use Python 3.11 or newer"))
    number = re.match(r"(\d+)\.(\d+)", machine.versions["torch"] or "")
    if number is None or (int(number[1]), int(number[2])) < OLDEST_TORCH:
        findings.append(
            Finding(
                "FAIL", "torch", "older than 2.9 or missing", "install torch 2.9 or newer for this Python"
            )
        )
    missing = [name for name in ("safetensors", "tokenizers", "aiohttp") if machine.versions[name] is None]
    if missing:
        remedy = "install ComfyUI's requirements.txt for this Python"
        findings.append(Finding("FAIL", "packages", f"{', '.join(missing)} missing", remedy))
    needed = {"nccl"} if machine.devices else {"gloo"}
    if not needed <= machine.backends:
        remedy = "install a torch build with torch.distributed"
        findings.append(Finding("FAIL", "communication", f"torch has no {', '.join(needed)}", remedy))
    return findings


def judge_host() -> list[Finding]:
    said: list[str] = []
    try:
        host = find_host(said.append, comfy_dir=os.environ.get("COMFYUI_DIR"))
    except LaunchError as error:
        return [Finding("FAIL", "ComfyUI", str(error), "set COMFYUI_DIR to the folder of a ComfyUI")]
    where = "used in place" if host.in_place else "with folders of its own for this pack"
    findings = [Finding("ok", "ComfyUI", f"{host.version} in {host.root} ({host.origin}), {where}")]
    return findings + judge_requirements(host)


def judge_requirements(host: ComfyHost) -> list[Finding]:
    requirements = host.root / "requirements.txt"
    if host.private or not requirements.is_file():
        return []
    missing = missing_requirements(requirements)
    if not missing:
        return []
    remedy = f"python -m pip install -r {requirements}"
    return [Finding("note", "ComfyUI", f"does not have what it asks for: {', '.join(missing)}", remedy)]


def judge_devices(machine: Machine) -> list[Finding]:
    if not machine.devices:
        text = "none that CUDA can use; ranks run on the CPU, which is for small checkpoints"
        return [
            Finding("note", "GPUs", text, "for the released weights use a machine with GPUs and their driver")
        ]
    findings = []
    for index, device in enumerate(machine.devices):
        major, minor = device.capability
        text = f"{device.name}, sm_{major}{minor}, {device.free / GB:.1f} of {device.total / GB:.1f} GB free"
        if device.capability < OLDEST_CAPABILITY:
            remedy = "leave it out with CUDA_VISIBLE_DEVICES; sm_80 or newer is needed"
            findings.append(Finding("FAIL", f"GPU {index}", text, remedy))
        elif device.free < 0.9 * device.total:
            findings.append(Finding("note", f"GPU {index}", text, "end other programs that hold its memory"))
        else:
            findings.append(Finding("ok", f"GPU {index}", text))
    return findings + judge_links(machine)


def judge_links(machine: Machine) -> list[Finding]:
    count = len(machine.devices)
    if count < 2:
        return []
    apart = [f"{i}-{j}" for i in range(count) for j in range(i + 1, count) if not machine.peers[i][j]]
    if not apart:
        return [Finding("ok", "links", f"all {count} GPUs reach each other's memory directly")]
    remedy = "choose linked GPUs with CUDA_VISIBLE_DEVICES, or look at the IOMMU and ACS settings"
    return [Finding("note", "links", f"no direct access between GPUs {', '.join(apart)}", remedy)]


def judge_room(machine: Machine) -> list[Finding]:
    findings = []
    for name, free in machine.disk_free.items():
        enough = free >= DISK_NEEDED
        remedy = "" if enough else f"free some GB there ({DISK_NEEDED / GB:.0f} GB are needed)"
        findings.append(
            Finding("ok" if enough else "FAIL", "disk", f"{free / GB:.1f} GB free for {name}", remedy)
        )
    ranks = len(machine.devices) or DEFAULT_CPU_RANKS
    enough = machine.memory_available >= ranks * MEMORY_PER_RANK
    text = f"{machine.memory_available / GB:.1f} GB available, {machine.cores} cores"
    remedy = (
        "" if enough else f"{ranks} ranks need about {ranks * MEMORY_PER_RANK / GB:.0f} GB before any weights"
    )
    findings.append(Finding("ok" if enough else "note", "host memory", text, remedy))
    text = f"{machine.shared_memory / GB:.2f} GB"
    if machine.shared_memory >= SHARED_MEMORY_NEEDED or len(machine.devices) < 2:
        findings.append(Finding("ok", "/dev/shm", text))
    else:
        findings.append(
            Finding("FAIL", "/dev/shm", text, "give the container more: docker run --shm-size=8g")
        )
    return findings


def judge_ports() -> list[Finding]:
    if not any(is_free(port) for port in range(20000, 20050)):
        remedy = "bring the loopback interface up: ip link set lo up"
        return [Finding("FAIL", "ports", "no program can listen on 127.0.0.1", remedy)]
    running = ", ".join(f"{record.url} (process {record.pid})" for record in live_records())
    findings = [Finding("note", "launches", f"running: {running}")] if running else []
    if is_free(COMFYUI_PORT):
        return [*findings, Finding("ok", "ports", f"{COMFYUI_PORT} is free")]
    return [*findings, Finding("note", "ports", f"{COMFYUI_PORT} is in use; `up` takes the next free one")]


def judge_checkpoint(folder: Path, machine: Machine) -> list[Finding]:
    """Read every header of the folder (no weights), and name the plan that fits."""
    from ..models.hunyuan_image_3.loading import LoadOptions, check_folder, resolve_plan
    from ..parallel.plan import PlanError, make_plan

    try:
        split, replicated = check_folder(folder, make_plan("single", world_size=1, rank=0), LoadOptions())
    except (ValueError, OSError) as error:
        return [
            Finding(
                "FAIL", "checkpoint", str(error), "repair or download the folder again, then run doctor again"
            )
        ]
    total = (split + replicated) / GB
    findings = [
        Finding("ok", "checkpoint", f"{folder}: complete, {total:.1f} GB of weights, every header readable")
    ]
    ranks = len(machine.devices) or DEFAULT_CPU_RANKS
    free = min((device.free for device in machine.devices), default=machine.memory_available // ranks)
    try:
        plan, reason = resolve_plan(folder, world_size=ranks, free_bytes_per_rank=free)
    except PlanError as error:
        return [*findings, Finding("FAIL", "plan", str(error), "use more or larger GPUs")]
    return [*findings, Finding("ok", "plan", f"{ranks} ranks: {plan.describe()} ({reason})")]
