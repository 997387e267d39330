"""A stand-in for ComfyUI that starts in an instant: the launcher's real path, without torch or nodes in the
ranks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MAIN = """
import argparse, json, os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import comfy.options
comfy.options.enable_args_parsing()
from comfy.cli_args import args
import folder_paths

script = os.environ.get("STUB_SCRIPT", "")
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("argv", json.dumps(sys.argv), flush=True)
print("user", folder_paths.user_directory, flush=True)
if script == "fail at start" and rank == "1":
    raise RuntimeError("rank 1 of the stand-in fails at its start")
if script == "end" and rank == "1":
    sys.exit(0)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/phase_parallel/status" and script == "no pack":
            self.send_error(404)
            return
        names = ("PHASE_", "GLOO", "CUDA", "OMP")
        shown = {key: value for key, value in os.environ.items() if key.startswith(names)}
        answer = {"argv": sys.argv, "environment": shown, "cwd": os.getcwd(), "restart": restart}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass

server = ThreadingHTTPServer((args.listen, args.port), Handler)
server.serve_forever()
"""

CLI_ARGS = """
import argparse
import comfy.options
parser = argparse.ArgumentParser()
parser.add_argument("--listen", nargs="?", default="127.0.0.1", const="0.0.0.0")
parser.add_argument("--port", type=int, default=8188)
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--temp-directory")
parser.add_argument("--output-directory")
parser.add_argument("--input-directory")
parser.add_argument("--extra-model-paths-config", nargs="+", action="append")
parser.add_argument("--dont-print-server", action="store_true")
parser.add_argument("--preview-method", choices=("none", "auto"))
MODERN
args = parser.parse_args() if comfy.options.args_parsing else parser.parse_args([])
"""

MODERN = """
parser.add_argument("--base-directory")
parser.add_argument("--user-directory")
parser.add_argument("--database-url")
parser.add_argument("--disable-api-nodes", action="store_true")
parser.add_argument("--disable-all-custom-nodes", action="store_true")
parser.add_argument("--whitelist-custom-nodes", nargs="+", default=[])
"""


def make_stand_in(root: Path, *, modern: bool) -> Path:
    (root / "comfy").mkdir(parents=True)
    (root / "main.py").write_text(MAIN)
    (root / "comfy" / "options.py").write_text(
        "args_parsing = False\ndef enable_args_parsing():\n    global args_parsing\n    args_parsing = True\n"
    )
    (root / "comfy" / "cli_args.py").write_text(CLI_ARGS.replace("MODERN", MODERN if modern else ""))
    (root / "folder_paths.py").write_text("user_directory = 'inside the host'\n")
    for name in ("server.py", "nodes.py"):
        (root / name).touch()
    return root


@pytest.fixture(params=["modern", "of 2024"])
def any_stand_in(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_stand_in(tmp_path / "comfy", modern=request.param == "modern")


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    return make_stand_in(tmp_path / "comfy", modern=True)


@pytest.fixture(autouse=True)
def private_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests must not see, or tidy, the launches of the person who runs them."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("COMFYUI_DIR", raising=False)
    return folder


def tree_of(root: Path) -> dict[str, int]:
    """Every file below root with its time of change: two equal trees mean that nothing was written."""
    return {
        str(path.relative_to(root)): os.stat(path).st_mtime_ns
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
