"""Options of the built-in rollouts: schemas of `rollout.engine_kwargs`, and checks of tensor parallelism.

options = ServerOptions.of({"vllm_server_base_url": "http://10.0.0.7:8000"}, world_size=1)
options.vllm_server_base_url            # ("http://10.0.0.7:8000",), one for each rank
options.arguments                       # arguments of the vLLM server that each rank starts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, field_validator

from camshaft.config.engine import Conflict, divisor, invalid_options
from camshaft.config.rollout import RolloutOptions

TENSOR_PARALLEL = "tensor_model_parallel_size"


class OneDeviceOptions(RolloutOptions):
    """No options; for rollouts that run on the device of their rank."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def of(cls, options: Mapping[str, Any], world_size: int = 1) -> OneDeviceOptions:
        if options:
            raise ValueError("the rollout takes no options. Omit the key, or set it to {} in the file")
        return cls()

    def conflicts(self, tensor_parallel_size: int, world_size: int) -> Iterator[Conflict]:
        if tensor_parallel_size > 2:  # the default of 2 is for vllm and ignored here
            yield Conflict(TENSOR_PARALLEL, "the rollout runs on one device", (f"{TENSOR_PARALLEL}=1", "name=vllm"))


class VLLMOptions(RolloutOptions):
    """Options of vLLM; consecutive ranks form one generator."""

    def conflicts(self, tensor_parallel_size: int, world_size: int) -> Iterator[Conflict]:
        if world_size % tensor_parallel_size:
            yield Conflict(
                TENSOR_PARALLEL,
                f"{tensor_parallel_size} ranks form one generator, which does not divide the {world_size} ranks of the "
                "run",
                (f"{TENSOR_PARALLEL}={divisor(world_size, tensor_parallel_size)}",),
            )


class SGLangOptions(RolloutOptions):
    """Options of SGLang; each rank has a generator, and a run with one rank may give it several processes."""

    def conflicts(self, tensor_parallel_size: int, world_size: int) -> Iterator[Conflict]:
        if tensor_parallel_size > 1 and world_size > 1:
            message = f"each of the {world_size} ranks has a separate generator with sglang"
            yield Conflict(TENSOR_PARALLEL, message, (f"{TENSOR_PARALLEL}=1",))


class ServerOptions(RolloutOptions):
    """Options of a vLLM server: the keys that camshaft reads, and `arguments` for the server that a rank starts."""

    model_config = ConfigDict(extra="forbid")

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
    """Arguments of the vLLM server that each rank starts."""

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
    def of(cls, options: Mapping[str, Any], world_size: int = 1) -> ServerOptions:
        names = cls.model_fields.keys() - {"arguments"}
        arguments = {name: value for name, value in options.items() if name not in names}
        values = {name: value for name, value in options.items() if name in names} | {"arguments": arguments}
        errors = invalid_options(cls, values)
        if errors:
            raise ValueError("; ".join(f"{error.option}: {error.message}" for error in errors))
        validated = cls.model_validate(values)
        urls = validated.vllm_server_base_url
        if urls and len(urls) != world_size:
            raise ValueError(
                f"vllm_server_base_url lists {len(urls)} server{'s' * (len(urls) > 1)} for {world_size} "
                f"rank{'s' * (world_size > 1)}. List one server per rank ({world_size}), or omit the key so that each "
                "rank starts a server"
            )
        if urls and arguments:
            raise ValueError(
                f"{', '.join(sorted(arguments))}: arguments for starting a server have no effect with "
                "vllm_server_base_url. Remove them here and pass them to the running server"
            )
        return validated

    def conflicts(self, tensor_parallel_size: int, world_size: int) -> Iterator[Conflict]:
        if tensor_parallel_size > 1 and not self.vllm_server_base_url:
            yield Conflict(
                TENSOR_PARALLEL,
                "a server that a rank starts runs on the device of that rank; a larger one must be started by hand",
                (f"{TENSOR_PARALLEL}=1", "+engine_kwargs.vllm_server_base_url=http://HOST:PORT"),
            )
