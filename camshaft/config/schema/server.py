"""Options of `rollout.engine_kwargs` for `rollout.name=server`: server addresses, or arguments to start servers.

options = ServerOptions.of({"vllm_server_base_url": "http://10.0.0.7:8000"}, ranks=1)
options.vllm_server_base_url            # ("http://10.0.0.7:8000",), one for each rank
options.arguments                       # all other keys: arguments of the vLLM server that is started
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from camshaft.config.engine import Frozen


class ServerOptions(Frozen):
    """Connection options, and the arguments of a vLLM server."""

    vllm_server_base_url: tuple[str, ...] = ()
    """URLs of running servers, one per rank, without a path; empty: each rank starts a server."""
    vllm_server_timeout: float = Field(default=240.0, gt=0)
    """Maximum startup time of a server in seconds, counted from the start of the run."""
    timeout: float = Field(default=3600.0, gt=0)
    """Timeout of one request in seconds; a request can cover a whole response."""
    retry_timeout: float = Field(default=5.0, ge=0)
    """Seconds during which a request is retried after a connection error or a server error."""
    weight_transfer: Literal["shared_memory", "broadcast"] | None = None
    """Transport of the weight sync; None: shared memory for a local server, broadcast for a remote one."""
    arguments: dict[str, Any] = Field(default_factory=dict)

    @field_validator("vllm_server_base_url", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("vllm_server_base_url")
    @classmethod
    def _urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        urls = tuple(url.rstrip("/").removesuffix("/v1") for url in value)
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.path:
                raise ValueError(f"'{url}' is not a server address; write it as http://127.0.0.1:8000")
        if len(set(urls)) < len(urls):
            raise ValueError("a server is listed twice; each rank sends its own weights and requires a separate server")
        return urls

    @classmethod
    def of(cls, engine_kwargs: Mapping[str, Any], ranks: int) -> ServerOptions:
        """Validate `engine_kwargs`; raise ValueError with a readable message if they are invalid."""
        names = cls.model_fields.keys() - {"arguments"}
        connection = {name: value for name, value in engine_kwargs.items() if name in names}
        arguments = {name: value for name, value in engine_kwargs.items() if name not in names}
        try:
            options = cls(**connection, arguments=arguments)
        except ValidationError as error:
            errors = [
                f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
            ]
            raise ValueError("; ".join(errors)) from error
        urls = options.vllm_server_base_url
        if urls and len(urls) != ranks:
            raise ValueError(
                f"vllm_server_base_url lists {len(urls)} server{'s' * (len(urls) > 1)} for {ranks} "
                f"rank{'s' * (ranks > 1)}. List one server per rank ({ranks}), or omit the key so that each rank "
                "starts a server"
            )
        if urls and arguments:
            raise ValueError(
                f"{', '.join(sorted(arguments))}: arguments for starting a server have no effect with "
                "vllm_server_base_url. Remove them here and pass them to the running server"
            )
        return options
