"""The few HTTP requests that the launcher makes, all to ranks on this machine. Standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

# A proxy from the environment must never see the ranks' traffic.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Refused(RuntimeError):
    """A rank answered with an HTTP error; `status` and the decoded `body` say why."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} answered {status}: {body[:500]}")
        self.status = status
        self.body = body


def get_bytes(url: str, *, body: Any = None, timeout: float = 10.0) -> bytes:
    """GET, or POST `body` as JSON. Raises Refused for an HTTP error, OSError when nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
    try:
        with _DIRECT.open(urllib.request.Request(url, data=data, headers=headers), timeout=timeout) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        raise Refused(url, error.code, error.read().decode(errors="replace")) from None


def get_json(url: str, *, body: Any = None, timeout: float = 10.0) -> Any:
    """As get_bytes, for a JSON answer. Raises ValueError when the answer is something else."""
    return json.loads(get_bytes(url, body=body, timeout=timeout))
