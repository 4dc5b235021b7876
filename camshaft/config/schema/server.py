"""What `rollout.engine_kwargs` means for `rollout.name=server`: where the server is, or how one is started.

options = ServerOptions.of({"vllm_server_base_url": "http://10.0.0.7:8000"}, ranks=1)
options.vllm_server_base_url            # ("http://10.0.0.7:8000",), one for each rank
options.arguments                       # the rest: what vLLM's own server is started with
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from camshaft.config.engine import Frozen


class ServerOptions(Frozen):
    """The keys of `engine_kwargs` that are not vLLM's, and those that are."""

    vllm_server_base_url: tuple[str, ...] = ()
    """Of servers that run already, one for each rank, without a path; none: each rank starts one of its own."""
    vllm_server_timeout: float = Field(default=240.0, gt=0)
    """Seconds until a server must be ready, counted from the start of the run."""
    timeout: float = Field(default=3600.0, gt=0)
    """Seconds for one answer, which may be a whole response."""
    retry_timeout: float = Field(default=5.0, ge=0)
    """Seconds for which a request is repeated that the server did not take, or answered with an error of its own."""
    weight_transfer: Literal["shared_memory", "broadcast"] | None = None
    """How weights get there; None: shared memory for a server of this machine, a broadcast for any other."""
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
                raise ValueError(f"'{url}' is not the address of a server; write it as http://127.0.0.1:8000")
        if len(set(urls)) < len(urls):
            raise ValueError("one server twice: each rank sends its own weights and needs a server of its own")
        return urls

    @classmethod
    def of(cls, engine_kwargs: Mapping[str, Any], ranks: int) -> ServerOptions:
        """What is wrong is a ValueError in words."""
        own = cls.model_fields.keys() - {"arguments"}
        given = {name: value for name, value in engine_kwargs.items() if name in own}
        rest = {name: value for name, value in engine_kwargs.items() if name not in own}
        try:
            options = cls(**given, arguments=rest)
        except ValidationError as error:
            told = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
            raise ValueError("; ".join(told)) from error
        urls = options.vllm_server_base_url
        if urls and len(urls) != ranks:
            raise ValueError(
                f"vllm_server_base_url names {len(urls)} server{'s' * (len(urls) > 1)} for {ranks} "
                f"rank{'s' * (ranks > 1)}: each rank sends its own weights. Name {ranks}, or leave it out: each rank "
                "starts one then"
            )
        if urls and rest:
            raise ValueError(
                f"{', '.join(sorted(rest))}: these are for starting a server, but vllm_server_base_url says that it "
                "runs already. Leave them out here, and give them to the server"
            )
        return options
