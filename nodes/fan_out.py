"""Asks the other ranks' ComfyUI processes to follow rank 0 for the length of one prompt, over their ordinary
HTTP door.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..parallel.environment import LaunchEnvironment
from ..parallel.faults import describe_cause
from .guard import SECRET_HEADER

FOLLOWER_ID = "PhaseParallelFollower"
_ANSWER_TIMEOUT_S = 5.0
_START_PATIENCE_S = 10.0
"""A rank that is still starting refuses connections; rank 0 may be a few seconds ahead of it."""

# Proxies of the user's environment are for the outside world, ranks are on loopback.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RankUnavailable(RuntimeError):
    """A rank does not take part; raised before any collective."""


def ask_followers(environment: LaunchEnvironment, session: int, prompt_id: str) -> None:
    """POST the follower prompt to all ranks but 0, at once.

    Raises:
        RankUnavailable: names the first rank that refused or did not answer, and why.
    """
    body = {
        "prompt": {"1": {"class_type": FOLLOWER_ID, "inputs": {"session": session, "prompt_id": prompt_id}}},
        # The March-2024 host makes its own id whatever we ask for, so nothing relies on this one; it makes
        # logs and history match.
        "prompt_id": prompt_id,
    }
    ranks = range(1, environment.world_size)
    with ThreadPoolExecutor(max_workers=len(ranks), thread_name_prefix="phase-parallel-ask") as pool:
        answers = list(pool.map(lambda rank: _ask(environment, rank, body), ranks))
    for rank, reason in zip(ranks, answers, strict=True):
        if reason:
            raise RankUnavailable(
                f"rank {rank} does not take part in this prompt: {reason}; see the log of rank {rank}, "
                "or restart the launch with `phase-parallel up`"
            )


def _ask(environment: LaunchEnvironment, rank: int, body: dict) -> str:
    """Empty when the rank accepted, else why not."""
    url = environment.url(rank) + "/prompt"
    headers = {"Content-Type": "application/json", SECRET_HEADER: environment.secret}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return _retry(lambda: _post(request, url), _START_PATIENCE_S)


def _retry(attempt: Callable[[], str], patience_s: float) -> str:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return attempt()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                return "nothing listens on its port"
            time.sleep(0.2)


def _post(request: urllib.request.Request, url: str) -> str:
    try:
        with _opener.open(request, timeout=_ANSWER_TIMEOUT_S) as answer:
            answer.read()
        return ""
    except urllib.error.HTTPError as error:
        return f"{url} answered {error.code} {_message(error.read())}".strip()
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            raise error.reason from error
        return f"{url} did not answer ({error.reason})"
    except (OSError, http.client.HTTPException) as error:
        return f"{url} gave no answer ({describe_cause(error)})"


def _message(body: bytes) -> str:
    """ComfyUI's own reason, from the JSON of a refused prompt."""
    try:
        error = json.loads(body).get("error", {})
    except ValueError:
        return ""
    return f"({error['message']})" if isinstance(error, dict) and error.get("message") else ""
