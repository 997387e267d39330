#!/usr/bin/env bash
# Start four ranks; options are those of `phase-parallel up`, ComfyUI's own go behind `--`.
set -euo pipefail
pack="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
if [ -z "${PYTHON:-}" ] && [ -x "$pack/.venv/bin/python" ]; then
    python="$pack/.venv/bin/python"
fi
exec "$python" "$pack/__main__.py" up --ranks 4 "$@"
