"""One vLLM engine in this process, through vLLM's public API: `LLM` and its methods.

engine = VLLMEngine.acquire(config)       # an idle one of this config, or a new one
engine.load(weights)                   # names and tensors; the caller has checked them
engine.load_adapter(weights)           # with `config.lora`, each time; the weights above stay
answers = engine.generate(requests, sampling, stop_ids)
engine.release()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
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
    """See the map above.

    An engine is never torn down: when vLLM ends one, it ends every process group of the process, those of the
    trainer and of other engines with it. What is given back waits, asleep, for the next one that wants the same.
    """

    _idle: dict[str, list[VLLMEngine]] = {}  # noqa: RUF012

    @classmethod
    def acquire(cls, config: RolloutEngineConfig) -> VLLMEngine:
        """An engine of this config that nobody else has."""
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
        reject_reserved(config.engine_kwargs, arguments)
        with startup_environment(config.device):
            vllm = import_vllm()
            self.version: str = vllm.__version__
            check_platform(config.device)
            try:
                self._llm: Any = vllm.LLM(**arguments, **config.engine_kwargs)
            except Exception as error:  # of vLLM, pydantic, torch and transformers
                raise RolloutError(f"vLLM {self.version} does not start: {error}{hint(self.version)}") from error
        workarounds.disable_exit_finalizer(self._llm)

    def release(self) -> None:
        """For whoever wants one of the same config next; nobody is given one that failed, it has requests inside."""
        self.sleep()
        self._idle.setdefault(self._failed or self._config.model_dump_json(), []).append(self)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that are one generator and must be given the same rows; None for one that is alone."""
        if self._config.tensor_model_parallel_size == 1:
            return None
        from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

        return get_tp_group().cpu_group

    # -- weights --------------------------------------------------------------------------------------

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights; a parameter that vLLM found nothing for is an error."""
        self._usable()
        with workarounds.capture_reload_warnings() as warnings:
            try:
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            except BaseException:
                # Half-loaded layers would count what came, and take later weights for superfluous.
                self._llm.apply_model(workarounds.finish_reload(self._llm.llm_engine.model_config))
                raise
        self._llm.apply_model(workarounds.repack_tied_head)
        # It says the same of layers that have nothing to load, rotary ones say; this sentence names parameters.
        left = [text for text in warnings if "not loaded from checkpoint" in text]
        if left:
            raise RolloutError(f"vLLM {self.version} did not take all weights: {'; '.join(left)}{hint(self.version)}")
        self._adapter = None  # vLLM has thrown it away
        self._forget_prefixes()

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the adapter; each has a number of its own, and vLLM never has two."""
        self._usable()
        self._forget_adapter()
        self._adapters += 1
        with peft_folder(weights, self._config) as folder:
            from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

            request = LoRARequest(f"adapter {self._adapters}", self._adapters, folder)
            try:
                self._llm.llm_engine.add_lora(request)
            except Exception as error:  # of vLLM's own kinds, and those of Python
                told = f"vLLM {self.version} does not take the adapter: {type(error).__name__}: {error}"
                raise RolloutError(f"{told}{hint(self.version)}") from error
        self._adapter = request
        self._forget_prefixes()

    def _forget_adapter(self) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            self._llm.llm_engine.remove_lora(adapter.lora_int_id)

    def _forget_prefixes(self) -> None:
        """Keys and values of the old weights must not serve new prompts."""
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM keeps keys and values of the weights before: it is still generating")

    def digests(self, expected: Mapping[str, Tensor]) -> dict[str, int]:
        """Of the weights that vLLM holds as they came, not fused, split or packed; by name."""
        (found,) = self._llm.apply_model(
            workarounds.parameter_digests(expected, whole=self._config.tensor_model_parallel_size == 1)
        )
        return found

    def adapter_digests(self, expected: Mapping[str, Tensor]) -> dict[str, int]:
        """Of all tensors of the adapter, and of what is there beside them; by name."""
        (found,) = self._llm.apply_model(adapter_digests(expected, self._adapters))
        return found

    # -- memory ---------------------------------------------------------------------------------------

    def sleep(self, keep_weights: bool = False) -> None:
        """Free keys and values, and the weights where vLLM can (on a GPU); those to keep go to the host's memory."""
        if self._asleep or self._failed:
            return
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM cannot sleep while it generates")
        self._forget_adapter()
        if self._llm.llm_engine.model_config.enable_sleep_mode:
            self._llm.sleep(level=1 if keep_weights else 2)
        elif self._config.free_cache_engine:
            (self._cache_sizes,) = self._llm.collective_rpc(workarounds.free_kv_cache)
        self._asleep = True

    def wake_up(self) -> None:
        """Memory for weights, and for keys and values."""
        self._usable()
        if not self._asleep:
            return
        if self._llm.llm_engine.model_config.enable_sleep_mode:
            self._llm.wake_up()
        elif self._config.free_cache_engine:
            self._llm.collective_rpc(workarounds.restore_kv_cache, args=(self._cache_sizes,))
        self._asleep = False

    # -- tokens ---------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[RowRequest], sampling: SamplingParams, stop_ids: Sequence[int]
    ) -> list[RowResponse]:
        """One answer per request, in their order. `stop_ids` are all tokens that end a row."""
        self._usable()
        from vllm import SamplingParams as Params  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        # What ends a row is said in full, so that vLLM's own reading of the folder adds nothing.
        common: dict[str, Any] = {
            "ignore_eos": True, "stop_token_ids": list(stop_ids), "stop": list(sampling.stop),
            "include_stop_str_in_output": True, "detokenize": bool(sampling.stop), "logprobs": 0, "flat_logprobs": True,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_k": max(sampling.top_k, 0), "top_p": sampling.top_p,
        }  # fmt: skip
        try:
            params = [Params(max_tokens=request.limit, seed=request.seed, **common) for request in requests]
        except Exception as error:  # of vLLM's own kind
            raise RolloutError(f"vLLM {self.version} does not sample so: {error}") from error
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        try:
            # It draws from the process' random state, and then overwrites it with each row's seed.
            with preserve_random_state(self._config.device):
                outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            if isinstance(error, Exception):
                raise RolloutError(f"vLLM {self.version} failed while generating: {self._failed}") from error
            raise
        return [_answer(output) for output in outputs]

    def _usable(self) -> None:
        if self._failed:
            raise RolloutError(f"this vLLM engine failed before ({self._failed}); start the run anew")


def engine_arguments(config: RolloutEngineConfig) -> dict[str, Any]:
    """What the keys of the config are called in vLLM."""
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
        # The default is the log-probs of the bare model, whatever it sampled from.
        "logprobs_mode": "processed_logprobs",
        # What the folder recommends for chatting is not what was asked for.
        "generation_config": "vllm",
        "enable_sleep_mode": config.free_cache_engine and not on_cpu,
    }
    if on_cpu:
        # A prompt in pieces and a row with a seed do not go together there: "CPU Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(config.max_num_batched_tokens, config.max_model_len)
        if "kv_cache_memory_bytes" not in config.engine_kwargs:
            arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    return arguments


def _rank_arguments(config: RolloutEngineConfig) -> dict[str, Any]:
    """For vLLM inside ranks that exist: it makes its groups of consecutive ones."""
    if world_size() == 1:
        return {}
    arguments = {"distributed_executor_backend": "external_launcher"}
    if torch.device(config.device).type == "cpu":
        arguments["worker_cls"] = "camshaft.rollout.vllm.cpu_worker.RankWorker"
    return arguments


def _answer(output: Any) -> RowResponse:
    row = output.outputs[0]
    return RowResponse(
        tokens=list(row.token_ids),
        log_probs=list(row.logprobs.logprobs)[: len(row.token_ids)],
        finished=row.finish_reason == "stop",
        cached=output.num_cached_tokens or 0,
    )
