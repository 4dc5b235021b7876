"""Options of the built-in rollouts: schemas of `rollout.engine_kwargs`, and checks of tensor parallelism.

options = ServerOptions.from_dict({"vllm_server_base_url": "http://10.0.0.7:8000"}, world_size=1)
options.vllm_server_base_url            # ("http://10.0.0.7:8000",), one URL per rank
options.arguments                       # arguments of the vLLM servers that the ranks start
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, field_validator

from camshaft.config.engine import Conflict, largest_divisor
from camshaft.config.rollout import RolloutOptions

TENSOR_PARALLEL = "tensor_model_parallel_size"
WeightTransfer = Literal["shared_memory", "device_memory", "broadcast", "device_broadcast"]
RUNNING_SERVER_KEYS = frozenset(
    {
        *("gpu_memory_utilization", "enforce_eager", "load_format", TENSOR_PARALLEL),
        *("enable_prefix_caching", "max_num_batched_tokens", "free_cache_engine"),
    }
)
"""Keys of the section `rollout` that a running server ignores, because its own command line sets them."""


class OneDeviceOptions(RolloutOptions):
    """Schema without options, for rollouts in which each rank generates on its own device."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], world_size: int = 1) -> Self:
        if options:
            raise ValueError("the rollout accepts no options. Omit the key, or set it to {} in the config file")
        return cls()

    def conflicts(self, tensor_parallel_size: int, world_size: int) -> Iterator[Conflict]:
        if tensor_parallel_size > 2:  # 2, the default of verl, is only reported to have no effect
            message = "the rollout does not support tensor parallelism"
            yield Conflict(TENSOR_PARALLEL, message, (f"{TENSOR_PARALLEL}=1", "name=vllm"))


class VLLMOptions(RolloutOptions):
    """Options of vLLM. Groups of consecutive ranks form one tensor-parallel engine."""

    def conflicts(self, tensor_parallel_size: int, world_size: int) -> Iterator[Conflict]:
        if world_size % tensor_parallel_size:
            yield Conflict(
                TENSOR_PARALLEL,
                f"world_size={world_size} is not divisible by the {tensor_parallel_size} ranks that form one "
                "vLLM engine",
                (f"{TENSOR_PARALLEL}={largest_divisor(world_size, tensor_parallel_size)}",),
            )


class SGLangOptions(RolloutOptions):
    """Options of SGLang. Each rank starts one engine; tensor parallelism requires a run with a single rank."""

    def conflicts(self, tensor_parallel_size: int, world_size: int) -> Iterator[Conflict]:
        if tensor_parallel_size > 1 and world_size > 1:
            message = f"sglang supports tensor parallelism only in a run with 1 rank, and this run has {world_size}"
            yield Conflict(TENSOR_PARALLEL, message, (f"{TENSOR_PARALLEL}=1",))


class ServerOptions(RolloutOptions):
    """Options of the vLLM server rollout.

    camshaft reads the fields of this class. All other options are collected in `arguments` and passed to the servers
    that the ranks start.
    """

    model_config = ConfigDict(extra="forbid")

    vllm_server_base_url: tuple[str, ...] = ()
    """URLs of running servers without a path, one per rank. If empty, each rank starts a server."""
    vllm_server_timeout: float = Field(default=240.0, gt=0)
    """Time in seconds to wait until a server is ready, at the start and after a failure."""
    timeout: float | None = Field(default=None, gt=0)
    """Timeout in seconds during which no response arrives. None applies only `trainer.worker_timeout`."""
    retry_timeout: float = Field(default=5.0, ge=0)
    """Time in seconds during which a request is retried after a connection error or an HTTP 5xx status."""
    weight_transfer: WeightTransfer | None = None
    """Transport of the weight sync. None selects device memory for a server on the trainer's device, shared memory for
    another local server, and broadcast for a remote one. device_broadcast is a broadcast between devices, over NCCL on
    GPUs."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the vLLM servers that the ranks start."""

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
            raise ValueError(
                "a server is listed twice, but each rank sends its weights to a separate server. List one server per "
                "rank"
            )
        return urls

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], world_size: int = 1) -> Self:
        names = cls.model_fields.keys() - {"arguments"}
        arguments = {name: value for name, value in options.items() if name not in names}
        values = {name: value for name, value in options.items() if name in names} | {"arguments": arguments}
        validated = super().from_dict(values)
        urls = validated.vllm_server_base_url
        if urls and len(urls) != world_size:
            raise ValueError(
                f"vllm_server_base_url lists {len(urls)} server{'s' * (len(urls) > 1)} for {world_size} "
                f"rank{'s' * (world_size > 1)}. List one server per rank ({world_size}), or omit the key so that each "
                "rank starts a server"
            )
        if urls and arguments:
            raise ValueError(
                f"{', '.join(sorted(arguments))}: arguments of a server that camshaft starts have no effect with "
                "vllm_server_base_url. Remove them, and pass them to the running server instead"
            )
        return validated

    @classmethod
    def uses_library(cls, options: Mapping[str, Any]) -> bool:
        return not options.get("vllm_server_base_url")  # a running server may have its own environment

    @classmethod
    def ignored_keys(cls, options: Mapping[str, Any]) -> frozenset[str]:
        return RUNNING_SERVER_KEYS if options.get("vllm_server_base_url") else frozenset()

    def conflicts(self, tensor_parallel_size: int, world_size: int) -> Iterator[Conflict]:
        if tensor_parallel_size > 1 and not self.vllm_server_base_url:
            yield Conflict(
                TENSOR_PARALLEL,
                "a server that a rank starts runs on the device of that rank only. Start a tensor-parallel server "
                "manually and set its URL",
                (f"{TENSOR_PARALLEL}=1", "engine_kwargs.vllm_server_base_url=http://HOST:PORT"),
            )
