"""The set-up's decisions, with pip and venv replaced (the real one takes minutes and gigabytes: `make test`
is its test).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from phase_parallel.launch.install_host import missing_requirements
from phase_parallel.launch.paths import PACK_ROOT


@pytest.fixture
def setup_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, working in a temporary checkout; `calls` holds what it would have done."""
    spec = importlib.util.spec_from_file_location(
        "setup_env_under_test", PACK_ROOT / "launch" / "setup_env.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / ".venv").mkdir()
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(module, "ENVIRONMENT", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "stamp.json")
    monkeypatch.setattr(module, "pip", lambda *words: calls.append(words))
    monkeypatch.setattr(module, "can_run", lambda: True)
    monkeypatch.setattr(module, "sees", lambda name: False)
    monkeypatch.setattr(module, "make_environment", lambda reuse: calls.append(("venv", str(reuse))))
    module.calls = calls
    return module


def change_stamp(setup_env: ModuleType, **fields: str) -> None:
    """Change what the last set-up noted, and forget what it called."""
    stamp = json.loads(setup_env.STAMP.read_text())
    setup_env.STAMP.write_text(json.dumps({**stamp, **fields}))
    setup_env.calls.clear()


def test_a_second_run_does_nothing(setup_env: ModuleType) -> None:
    setup_env.set_up(device="cpu", any_python=True)
    assert setup_env.calls[0] == ("venv", "False")
    assert ("-r", "requirements-torch.txt") in setup_env.calls
    assert ("--no-deps", "-r", "requirements-torchaudio.txt") in setup_env.calls
    setup_env.calls.clear()
    setup_env.set_up(device="cpu", any_python=True)
    setup_env.set_up(device="cpu", any_python=False)
    assert setup_env.calls == []


def test_new_requirements_are_installed_into_the_same_environment(setup_env: ModuleType) -> None:
    setup_env.set_up(device="cpu", any_python=True)
    change_stamp(setup_env, requirements="older")
    setup_env.set_up(device="cpu", any_python=True)
    assert setup_env.calls and setup_env.calls[0][0] != "venv"


def test_only_a_python_that_was_asked_for_renews_the_environment(setup_env: ModuleType) -> None:
    setup_env.set_up(device="cpu", any_python=True)
    change_stamp(setup_env, made_by="/some/other/python")
    setup_env.set_up(device="cpu", any_python=True)
    assert setup_env.calls == []
    setup_env.set_up(device="cpu", any_python=False)
    assert setup_env.calls[0] == ("venv", "False")


def test_an_environment_that_was_moved_or_broken_is_renewed(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_env.set_up(device="cpu", any_python=True)
    change_stamp(setup_env, checkout="/where/it/was/before")
    setup_env.set_up(device="cpu", any_python=True)
    assert setup_env.calls[0] == ("venv", "False")
    setup_env.calls.clear()
    monkeypatch.setattr(setup_env, "can_run", lambda: False)
    setup_env.set_up(device="cpu", any_python=True)
    assert setup_env.calls[0] == ("venv", "False")


def test_an_installed_torch_is_reused_for_gpus(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "sees", lambda module: module == "torch")
    monkeypatch.setattr(setup_env, "torch_version", lambda: "2.11.0+cu130")
    setup_env.set_up(device="cuda", any_python=True)
    assert setup_env.calls[0] == ("venv", "True")
    assert ("-r", "requirements-torch.txt") not in setup_env.calls
    assert ("--no-deps", "torchvision==0.26.*") in setup_env.calls
    setup_env.calls.clear()
    setup_env.set_up(device="cpu", any_python=True)
    assert setup_env.calls == [], "what serves a GPU serves a CPU too"


def test_a_failed_pip_leaves_no_stamp(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: str) -> None:
        raise setup_env.SetupError("pip could not install")

    monkeypatch.setattr(setup_env, "pip", fail)
    with pytest.raises(setup_env.SetupError):
        setup_env.set_up(device="cpu", any_python=True)
    assert not setup_env.STAMP.exists()


def test_the_script_imports_the_standard_library_only() -> None:
    script = PACK_ROOT / "launch" / "setup_env.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", script, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_missing_requirements_of_a_comfyui(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# a comment\ntorch\npytest>=1\npytest==0.0.1\nno-such-package-of-ours~=2.0\n\n")
    assert missing_requirements(file) == ["pytest==0.0.1", "no-such-package-of-ours~=2.0"]
