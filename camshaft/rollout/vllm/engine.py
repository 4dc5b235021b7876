"""One vLLM engine in this process, used through vLLM's public API (`vllm.LLM` and its methods).

engine = VLLMEngine.acquire(config)    # reuses an idle engine with this config or starts a new one
engine.load(weights)                   # pairs of name and tensor, validated by the caller
engine.load_adapter(weights)           # if `config.lora` is set; keeps the base weights
responses = engine.generate(requests, sampling, stop_ids)
engine.release()
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config.rollout import OPTIONAL_SAMPLING, RolloutEngineConfig
from camshaft.device import world_size
from camshaft.errors import RolloutError
from camshaft.models.loader import has_tokenizer, model_folder
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.external import CPU_CACHE_BYTES, RowRequest, RowResponse, reject_reserved
from camshaft.rollout.vllm import workarounds
from camshaft.rollout.vllm.adapters import adapter_arguments, adapter_digests, peft_folder
from camshaft.rollout.vllm.environment import preserve_random_state, startup_environment
from camshaft.rollout.vllm.installed import check_platform, hint, import_vllm


class VLLMEngine:
    """A vLLM engine that rollouts with the same config reuse, one after another.

    An engine is never shut down, because vLLM's shutdown destroys all process groups of the process, including those of
    the trainer and of other engines. A released engine sleeps until a rollout with the same config acquires it.
    """

    _idle: dict[str, list["VLLMEngine"]] = {}  # noqa: RUF012

    @classmethod
    def acquire(cls, config: RolloutEngineConfig) -> "VLLMEngine":
        """Return an idle engine with this config, or start a new one."""
        idle = cls._idle.get(config.model_dump_json(), [])
        return idle.pop() if idle else cls(config)

    def __init__(self, config: RolloutEngineConfig):
        self._config = config
        self._asleep = False
        self._failed = ""
        self._cache_sizes: list[int] = []
        self._adapters = 0
        self._adapter: Any = None
        arguments = engine_arguments(config) | _rank_arguments(config) | adapter_arguments(config)
        arguments["max_logprobs"] = -1  # `score` limits top_k itself
        reject_reserved(config.engine_kwargs, arguments)
        with startup_environment(config.device):
            vllm = import_vllm()
            self.version: str = vllm.__version__
            check_platform(config.device)
            try:
                self._llm: Any = vllm.LLM(**arguments, **config.engine_kwargs)
            except Exception as error:  # from vLLM, pydantic, torch or transformers
                raise RolloutError(f"vLLM {self.version} failed to start: {error}{hint(self.version)}") from error
        workarounds.disable_exit_finalizer(self._llm)

    def release(self) -> None:
        """Put the engine to sleep until it is reused. A failed engine is never reused: it still has queued requests."""
        self.sleep()
        self._idle.setdefault(self._failed or self._config.model_dump_json(), []).append(self)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that share this engine and must receive the same rows; None for a single rank."""
        if self._config.tensor_model_parallel_size == 1:
            return None
        from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

        return get_tp_group().cpu_group

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights. Raise an error if vLLM leaves a parameter unset."""
        self._check_usable()
        with workarounds.capture_reload_warnings() as warnings:
            try:
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            except BaseException:
                # Otherwise partially loaded layers would count these weights and ignore those of the next reload.
                self._llm.apply_model(workarounds.finish_reload(self._llm.llm_engine.model_config))
                raise
        self._llm.apply_model(workarounds.repack_tied_head)
        self._llm.apply_model(workarounds.repack_experts)
        # Other warnings concern layers without weights, such as rotary embeddings; this one lists unset parameters.
        missing = [text for text in warnings if "not loaded from checkpoint" in text]
        if missing:
            message = f"vLLM {self.version} did not load all weights: {'; '.join(missing)}"
            raise RolloutError(f"{message}{hint(self.version)}")
        self._adapter = None  # the reload has removed the adapter
        self._reset_prefix_cache()

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the adapter under a new id, because vLLM ignores the weights of an id that it has already loaded."""
        self._check_usable()
        self._remove_adapter()
        self._adapters += 1
        with peft_folder(weights, self._config) as folder:
            from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

            request = LoRARequest(f"adapter {self._adapters}", self._adapters, folder)
            try:
                self._llm.llm_engine.add_lora(request)
            except Exception as error:  # vLLM raises its own and built-in types
                message = f"vLLM {self.version} rejected the adapter: {type(error).__name__}: {error}"
                raise RolloutError(f"{message}{hint(self.version)}") from error
        self._adapter = request
        self._reset_prefix_cache()

    def _remove_adapter(self) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            self._llm.llm_engine.remove_lora(adapter.lora_int_id)

    def _reset_prefix_cache(self) -> None:
        """Drop cached keys and values of the old weights."""
        if not self._llm.reset_prefix_cache():
            raise RolloutError(
                "vLLM cannot reset its prefix cache while it generates; sync weights after generate_sequences() returns"
            )

    def digests(self, expected: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the checksums, by name, of the weights that vLLM stores unchanged (not fused, sharded or packed)."""
        (digests,) = self._llm.apply_model(
            workarounds.parameter_digests(expected, unsharded=self._config.tensor_model_parallel_size == 1)
        )
        return digests

    def adapter_digests(self, expected: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the checksums, by name, of all tensors of the adapter and of unexpected tensors in vLLM."""
        (digests,) = self._llm.apply_model(adapter_digests(expected, self._adapters))
        return digests

    def sleep(self, keep_weights: bool = False) -> None:
        """Free the KV cache and, on a GPU, the weights. `keep_weights` moves the weights to host memory instead."""
        if self._asleep or self._failed:
            return
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM cannot sleep while it generates; wait for generate_sequences() to return")
        self._remove_adapter()
        if self._llm.llm_engine.model_config.enable_sleep_mode:
            self._llm.sleep(level=1 if keep_weights else 2)
        elif self._config.free_cache_engine:
            (self._cache_sizes,) = self._llm.collective_rpc(workarounds.free_kv_cache)
        self._asleep = True

    def wake_up(self) -> None:
        """Allocate the KV cache and, on a GPU, memory for the weights."""
        self._check_usable()
        if not self._asleep:
            return
        if self._llm.llm_engine.model_config.enable_sleep_mode:
            self._llm.wake_up()
        elif self._config.free_cache_engine:
            self._llm.collective_rpc(workarounds.restore_kv_cache, args=(self._cache_sizes,))
        self._asleep = False

    def generate(
        self, requests: Sequence[RowRequest], sampling: SamplingParams, stop_ids: Sequence[int]
    ) -> list[RowResponse]:
        """Return one response per request, in request order.

        `stop_ids` contains every token id that ends a response.
        """
        self._check_usable()
        import vllm  # pyright: ignore[reportMissingImports]

        # All stop conditions are passed explicitly, so that vLLM adds none from the model folder.
        common_options: dict[str, Any] = {
            "ignore_eos": True, "stop_token_ids": list(stop_ids), "stop": list(sampling.stop),
            "include_stop_str_in_output": True, "detokenize": bool(sampling.stop), "logprobs": 0, "flat_logprobs": True,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_k": max(sampling.top_k, 0), "top_p": sampling.top_p,
            **{name: float(getattr(sampling, name)) for name in OPTIONAL_SAMPLING},
        }  # fmt: skip
        try:
            params = [
                vllm.SamplingParams(  # pyright: ignore[reportAttributeAccessIssue]
                    max_tokens=request.limit, seed=request.seed, **common_options
                )
                for request in requests
            ]
        except Exception as error:  # vLLM raises its own types
            raise RolloutError(f"vLLM {self.version} rejected the sampling options: {error}") from error
        return [_to_response(output) for output in self._run([request.prompt for request in requests], params)]

    def score(self, prompts: Sequence[list[int]], top_k: int) -> list[tuple[Tensor, Tensor]]:
        """Return token ids and log-probs (T, 1 + k) for each prompt: those of its tokens, and of the most likely ones.

        Those of a first token are -1 and NaN.
        """
        self._check_usable()
        import vllm  # pyright: ignore[reportMissingImports]

        params: Any = vllm.SamplingParams(  # pyright: ignore[reportAttributeAccessIssue]
            max_tokens=1, detokenize=False, prompt_logprobs=top_k, flat_logprobs=True
        )
        scored = [prompt for prompt in prompts if len(prompt) > 1]
        outputs = iter(self._run(scored, params) if scored else [])
        rows = list[tuple[Tensor, Tensor]]()
        for prompt in prompts:
            ids = torch.full((len(prompt), 1 + top_k), -1)
            log_probs = torch.full(ids.shape, torch.nan)
            if len(prompt) > 1:
                columns = next(outputs).prompt_logprobs
                ids[1:] = torch.tensor(columns.token_ids).view(-1, 1 + top_k)
                log_probs[1:] = torch.tensor(columns.logprobs).view(-1, 1 + top_k)
            rows.append((ids, log_probs))
        return rows

    def _run(self, prompts: Sequence[list[int]], params: Any) -> list[Any]:
        """Return vLLM's output for each prompt. `params` are the same for all, or a list."""
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        try:
            # vLLM seeds the global random state with the seed of each row.
            with preserve_random_state(self._config.device):
                return self._llm.generate(inputs, params, use_tqdm=False, lora_request=self._adapter)
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            if isinstance(error, Exception):
                raise RolloutError(f"vLLM {self.version} failed while generating: {self._failed}") from error
            raise

    def _check_usable(self) -> None:
        if self._failed:
            raise RolloutError(f"this vLLM engine failed in an earlier call ({self._failed}); restart the run")


def engine_arguments(config: RolloutEngineConfig) -> dict[str, Any]:
    """Translate the config into arguments of `vllm.LLM`."""
    folder = model_folder(config.model_path)
    on_cpu = torch.device(config.device).type == "cpu"
    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": not has_tokenizer(folder),
        "trust_remote_code": config.trust_remote_code,
        "hf_overrides": dict(config.override_config),
        "dtype": config.dtype,
        "load_format": "dummy" if config.load_format.startswith("dummy") else "auto",
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        # By default, vLLM returns log-probs before temperature, top_k, top_p and the other settings are applied.
        "logprobs_mode": "processed_logprobs",
        # Ignore the sampling defaults in the model's generation_config.json.
        "generation_config": "vllm",
        "enable_sleep_mode": config.free_cache_engine and not on_cpu,
    }
    if on_cpu:
        # Chunked prefill and per-row seeds are incompatible on a CPU: "CPU Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(config.max_num_batched_tokens, config.max_model_len)
        if "kv_cache_memory_bytes" not in config.engine_kwargs:
            arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    return arguments


def _rank_arguments(config: RolloutEngineConfig) -> dict[str, Any]:
    """Return the arguments that run vLLM inside existing ranks. Each engine uses consecutive ranks."""
    if world_size() == 1:
        return {}
    arguments = {"distributed_executor_backend": "external_launcher"}
    if torch.device(config.device).type == "cpu":
        arguments["worker_cls"] = "camshaft.rollout.vllm.cpu_worker.RankWorker"
    return arguments


def _to_response(output: Any) -> RowResponse:
    row = output.outputs[0]
    return RowResponse(
        tokens=list(row.token_ids),
        log_probs=list(row.logprobs.logprobs)[: len(row.token_ids)],
        finished=row.finish_reason == "stop",
        num_cached=output.num_cached_tokens or 0,
    )
