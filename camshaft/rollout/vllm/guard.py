"""Middleware of vLLM's server that requires an API key on every route.

    VLLM_API_KEY=... vllm serve ... --middleware camshaft.rollout.vllm.guard.KeyGuard

The key of vLLM itself protects the routes under /v1 and a few others, but not those that replace weights and call
methods of the workers. vLLM imports this module by name.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from camshaft.errors import RolloutError

API_KEY = "VLLM_API_KEY"
"""Environment variable with the key. The trainer's client and vLLM read the same variable."""
UNAUTHORIZED = b'{"error": "this server requires an API key; set VLLM_API_KEY"}'

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Application = Callable[[Mapping[str, Any], Receive, Send], Awaitable[None]]


class KeyGuard:
    """ASGI middleware that answers requests without the key with HTTP 401."""

    def __init__(self, app: Application):
        key = os.environ.get(API_KEY, "")
        if not key:
            raise RolloutError(f"{API_KEY} is not set; set it to a secret for the server and for the trainer")
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(UNAUTHORIZED)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": UNAUTHORIZED})

    def _has_key(self, scope: Mapping[str, Any]) -> bool:
        values = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(values) == 1 and hmac.compare_digest(values[0], self._expected)
