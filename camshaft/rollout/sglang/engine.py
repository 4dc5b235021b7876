"""One SGLang engine, used through SGLang's public API (`sglang.Engine` and its methods).

engine = SGLangEngine(config)
digests = engine.load(weights)         # pairs of name and tensor, validated by the caller
responses = engine.generate(requests, sampling, stop_ids)

The engine requires a separate process; see `rollout.py`.
"""

import functools
import json
import multiprocessing
import os
import queue
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from camshaft.config.model_settings import read_settings
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import load_config, model_folder
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.external import CPU_CACHE_BYTES, RowRequest, RowResponse, reject_reserved
from camshaft.rollout.sglang.installed import check_installed, hint

REPORT_SECONDS = 60.0
"""Time limit, in seconds, for SGLang's processes to report checksums after a weight update."""


class SGLangEngine:
    """An SGLang engine that verifies its weight updates."""

    def __init__(self, config: RolloutEngineConfig):
        _check_length(config)
        self._config = config
        self._hint = hint(check_installed())
        self._has_memory_saver = config.free_cache_engine and torch.device(config.device).type != "cpu"
        self._asleep = False
        self._reports: queue.Queue[tuple[dict[str, int], str]] = queue.Queue()
        # Otherwise each process of SGLang warns about every feature that the device does not support.
        os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # see `engine_arguments`
        if config.tensor_model_parallel_size > 1 and torch.device(config.device).type == "cpu":
            # By default, SGLang requires one NUMA node per process.
            cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
            binding = "|".join([cores] * config.tensor_model_parallel_size)
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            arguments = engine_arguments(config)
            reject_reserved(config.engine_kwargs, arguments)
            self._start(default_arguments(config) | arguments | config.engine_kwargs)

    def _start(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine  # pyright: ignore[reportMissingImports]

        from camshaft.rollout.sglang import worker

        worker.register_sampler()
        reader, writer = Pipe(duplex=False)
        writing = multiprocessing.get_context("spawn").Lock()  # a message can take several writes
        # The pipe is read continuously, because a full pipe would block SGLang's processes.
        threading.Thread(target=self._receive_reports, args=(reader,), daemon=True).start()

        class ReportingEngine(Engine):
            run_scheduler_process_func = staticmethod(functools.partial(worker.run, writer, writing))

        self._row_params: str = worker.RowParams.to_str()
        try:
            self._engine: Any = ReportingEngine(**arguments)
        except Exception as error:  # from SGLang, torch or transformers
            raise RolloutError(f"SGLang failed to start: {type(error).__name__}: {error}{self._hint}") from error
        finally:
            writer.close()

    def _receive_reports(self, reader: Connection) -> None:
        while True:
            try:
                self._reports.put(reader.recv())
            except EOFError:
                return

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
        """Replace all weights and return their checksums, which the processes that hold the model compute."""
        from camshaft.rollout.sglang.worker import BEGIN, FINISH, LOAD

        windows = [("windows", torch.tensor([count_windowed_layers(self._config)]))]
        self._check(self._engine.begin_weight_update())
        try:
            self._send(windows, BEGIN)
            for bucket in _buckets(weights, self._config.update_weights_bucket_megabytes * 2**20):
                self._send(bucket, LOAD)
            # Drop cached keys and values of the old weights.
            self._send(windows, FINISH, flush_cache=True)
        except Exception as error:
            try:
                self._check(self._engine.end_weight_update())
            except Exception as end_error:  # from SGLang
                error.add_note(f"Ending the weight update also failed: {end_error}")
            raise
        self._check(self._engine.end_weight_update())
        try:
            reports = [
                self._reports.get(timeout=REPORT_SECONDS) for _ in range(self._config.tensor_model_parallel_size)
            ]
        except queue.Empty as error:
            message = f"SGLang's processes did not report checksums within {REPORT_SECONDS:g} s; restart the run"
            raise RolloutError(f"{message}{self._hint}") from error
        problem = next((message for _, message in reports if message), "")
        if problem:
            raise RolloutError(f"SGLang rejected the weights: {problem}{self._hint}")
        digests = reports[0][0]
        for rank, (rank_digests, _) in enumerate(reports):
            names = [name for name in digests if rank_digests.get(name) != digests[name]]
            if names:
                raise RolloutError(
                    f"ranks 0 and {rank} of SGLang received different weights for {', '.join(names[:8])}; restart "
                    "the run"
                )
        return digests

    def _send(self, named: list[tuple[str, Tensor]], loader: str, flush_cache: bool = False) -> None:
        self._check(self._engine.update_weights_from_tensor(named, load_format=loader, flush_cache=flush_cache))

    def _check(self, result: tuple[bool, str]) -> None:
        """Raise an error if an update failed. SGLang returns (success, message) instead of raising."""
        success, message = result
        if not success:
            raise RolloutError(f"SGLang failed to update weights: {message}{self._hint}")

    def sleep(self) -> None:
        """Free the weights and the KV cache on a GPU, or clear the prefix cache on a CPU."""
        if self._asleep:
            return
        if self._has_memory_saver:
            self._engine.release_memory_occupation()
        else:
            self._engine.flush_cache()
        self._asleep = True

    def wake_up(self) -> None:
        if self._asleep and self._has_memory_saver:
            self._engine.resume_memory_occupation()
        self._asleep = False

    def generate(
        self, requests: Sequence[RowRequest], sampling: SamplingParams, stop_ids: Sequence[int]
    ) -> list[RowResponse]:
        """Return one response per request, in request order.

        `stop_ids` contains every token id that ends a response. Stop strings have no effect here; the caller truncates
        the responses.
        """
        params = [_build_sampling_params(request, sampling, stop_ids) for request in requests]
        prompts = [request.prompt for request in requests]
        try:
            outputs = self._engine.generate(
                input_ids=prompts,
                sampling_params=params,
                return_logprob=True,
                custom_logit_processor=[self._row_params] * len(prompts),
            )
        except ValueError as error:
            raise RolloutError(f"SGLang failed to generate: {error}{self._hint}") from error
        return [self._to_response(row, output, set(stop_ids)) for row, output in enumerate(outputs)]

    def _to_response(self, row: int, output: dict[str, Any], ends: set[int]) -> RowResponse:
        info, tokens = output["meta_info"], list(output["output_ids"])
        if info["finish_reason"]["type"] not in ("stop", "length"):
            raise RolloutError(f"SGLang did not finish row {row}: {info['finish_reason']}{self._hint}")
        # If ignore_eos is set, SGLang continues after all stop tokens, including those of the call.
        end = next((position for position, token in enumerate(tokens) if token in ends), None)
        count = len(tokens) if end is None else end + 1
        log_probs = [value for value, *_ in info["output_token_logprobs"][:count]]
        return RowResponse(tokens[:count], log_probs, end is not None, info["cached_tokens"])


def _build_sampling_params(request: RowRequest, sampling: SamplingParams, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Build SGLang's sampling parameters. `worker.RowSampler` reads the sampling options only from `custom_params`."""
    row = {
        "seed": request.seed, "greedy": sampling.greedy, "temperature": float(sampling.temperature),
        "top_k": sampling.top_k, "top_p": float(sampling.top_p),
    }  # fmt: skip
    return {
        "max_new_tokens": request.limit, "custom_params": row, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "ignore_eos": sampling.ignore_eos, "stop_token_ids": list(stop_ids),
    }  # fmt: skip


def engine_arguments(config: RolloutEngineConfig) -> dict[str, Any]:
    """Translate the config into arguments of `sglang.Engine` and add the arguments that this rollout requires."""
    from camshaft.rollout.sglang.worker import BEGIN, FINISH, LOAD, SAMPLER

    device = torch.device(config.device)
    arguments: dict[str, Any] = {
        "model_path": str(model_folder(config.model_path)),
        "trust_remote_code": config.trust_remote_code,
        "json_model_override_args": json.dumps(config.override_config),
        "device": device.type,
        "dtype": config.dtype,
        "load_format": "dummy" if config.load_format.startswith("dummy") else "auto",
        "random_seed": config.seed & (2**31 - 1),
        "tp_size": config.tensor_model_parallel_size,
        "disable_cuda_graph": config.enforce_eager,
        # SGLang reserves a few positions. Rows are still limited to `max_model_len`.
        "context_length": config.max_model_len + 8,
        "max_running_requests": config.max_num_seqs,
        "chunked_prefill_size": config.max_num_batched_tokens,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "disable_radix_cache": not config.enable_prefix_caching,
        "enable_memory_saver": config.free_cache_engine and device.type != "cpu",
        "sampling_backend": SAMPLER,
        "enable_custom_logit_processor": True,
        "custom_weight_loader": [BEGIN, LOAD, FINISH],
        # Exchange token ids, and ignore the sampling defaults in the model's generation_config.json.
        "skip_tokenizer_init": True,
        "sampling_defaults": "openai",
    }
    if device.type == "cpu":
        arguments["disable_overlap_schedule"] = True
    else:
        arguments["mem_fraction_static"] = config.gpu_memory_utilization
        arguments["base_gpu_id"] = device.index or 0
    return arguments


def default_arguments(config: RolloutEngineConfig) -> dict[str, Any]:
    """Return default arguments, which `engine_kwargs` may override."""
    # Without `sleep_on_idle`, each process of SGLang keeps a core busy during training.
    defaults: dict[str, Any] = {"log_level": "error", "skip_server_warmup": True, "sleep_on_idle": True}
    if torch.device(config.device).type == "cpu":
        # The fraction is large because it includes the memory of other processes. `max_total_tokens` is the real limit.
        defaults |= {"attention_backend": "torch_native", "mem_fraction_static": 0.9}
        defaults["max_total_tokens"] = _cpu_cache_tokens(config)
    return defaults


def count_windowed_layers(config: RolloutEngineConfig) -> int:
    """Count the layers with a sliding window shorter than `max_model_len`."""
    text = _text_config(config)
    window = text.get("sliding_window")
    if window is None or window >= config.max_model_len:
        return 0
    return (text.get("layer_types") or ["sliding_attention"] * text["num_hidden_layers"]).count("sliding_attention")


def _check_length(config: RolloutEngineConfig) -> None:
    settings = read_settings(config.model_path, config.override_config)
    positions = None if settings is None else settings.positions()
    if positions is not None and config.max_model_len > positions[1]:
        raise RolloutError(
            f"max_model_len={config.max_model_len} exceeds the {positions[1]} positions of the model "
            f"({positions[0]}); set max_model_len to {positions[1]} or less"
        )


def _text_config(config: RolloutEngineConfig) -> dict[str, Any]:
    folder = model_folder(config.model_path)
    return load_config(folder, config.trust_remote_code, config.override_config).get_text_config().to_dict()


def _cpu_cache_tokens(config: RolloutEngineConfig) -> int:
    text = _text_config(config)
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    per_token = 2 * text["num_hidden_layers"] * heads * size * getattr(torch, config.dtype).itemsize
    return max(CPU_CACHE_BYTES // per_token, 2 * config.max_model_len)


def _buckets(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield copies of the weights in buckets of at most `size` bytes, or of a single tensor if it is larger.

    The weights are copied because SGLang changes the storage of the tensors that it receives.
    """
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        if bucket and num_bytes + tensor.nbytes > size:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor.detach().clone(memory_format=torch.contiguous_format)))
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket
