"""Worker extension of vLLM's server that receives weights from a trainer and returns checksums.

    vllm serve ... --worker-extension-cls camshaft.rollout.vllm.worker.WorkerExtension

vLLM imports this module by name and adds `WorkerExtension` to its workers. `rollout/server/client.py` sends requests as
`POST /collective_rpc` with the method `camshaft`, whose arguments are the name of a method of `WorkerWeights` and its
arguments as JSON. The response is {"result": ...}, {"error": message} for a `RolloutError`, or {"traceback": text} for
any other exception. The workers of a restarted server have a new identity.
"""

import contextlib
import functools
import json
import secrets
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from camshaft.device import device_identity
from camshaft.digest import record_digests
from camshaft.errors import RolloutError
from camshaft.models.loader import file_layout
from camshaft.rollout.vllm import workarounds
from camshaft.rollout.weights.buckets import Assembler, Bucket, Piece
from camshaft.rollout.weights.checks import drop_tied_duplicates, split_stacked
from camshaft.rollout.weights.transport import open_receiver


class WorkerExtension:
    """Mixin that vLLM adds to the class of its workers."""

    def camshaft(self, method: str, payload: str = "{}") -> dict[str, Any]:
        """Call a method of `WorkerWeights`. Return exceptions as data, because vLLM's server drops their messages."""
        weights: WorkerWeights = vars(self).setdefault("_camshaft_weights", WorkerWeights(self))
        methods = {
            function.__name__: function
            for function in (
                weights.hello, weights.state, weights.begin, weights.bucket, weights.end, weights.abort,
                weights.digests, weights.free_kv_cache, weights.restore_kv_cache,
            )
        }  # fmt: skip
        try:
            return {"result": methods[method](**json.loads(payload))}
        except RolloutError as error:
            return {"error": str(error)}
        except Exception:
            return {"traceback": traceback.format_exc().rstrip()}


class WorkerWeights:
    """The weights of one worker and the state of its weight sync."""

    def __init__(self, worker: Any):
        self._worker = worker
        self._identity = secrets.token_hex(8)
        self._version: str | None = None
        self._received_digests: dict[str, int] = {}
        self._canonical_names: Mapping[str, str] = {}
        self._sent_names: set[str] = set()
        self._shapes: dict[str, Tensor] = {}
        self._update: _WeightUpdate | None = None
        self._cache_sizes: list[int] = []

    def hello(self) -> dict[str, Any]:
        """Return the worker's identity, its weight version, and the settings that the trainer checks."""
        config = self._worker.vllm_config.model_config
        return self.state() | {
            "logprobs_mode": str(config.logprobs_mode),
            "generation_config": str(config.generation_config),
            "max_model_len": int(config.max_model_len),
            "dtype": str(config.dtype).removeprefix("torch."),
            "device": device_identity(self._worker.device),
        }

    def state(self) -> dict[str, Any]:
        return {"identity": self._identity, "version": self._version}

    def begin(self, handle: dict[str, Any], canonical_names: dict[str, str], shapes: dict[str, Any]) -> None:
        """Begin a weight sync. The worker has no valid weights until `end`.

        `canonical_names` maps the name of each weight to the name under which vLLM loads it. `shapes` maps it to a
        dtype and a shape.
        """
        self.abort()
        self._version, self._received_digests = None, {}
        self._canonical_names, self._sent_names = canonical_names, set()
        self._shapes = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in shapes.items()
        }
        self._update = _WeightUpdate(self._worker, handle)

    def bucket(self, pieces: list[dict[str, Any]], buffer: int, num_bytes: int) -> None:
        """Receive and load one bucket."""
        assert self._update is not None
        self._update.load(Bucket([Piece(**piece) for piece in pieces], buffer, num_bytes), self._record)

    def _record(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Record the checksum of each weight, and yield each tied weight once and stacked experts separately."""
        untied = drop_tied_duplicates(
            record_digests(weights, self._received_digests), self._canonical_names, self._sent_names
        )
        return split_stacked(untied, self._layout)

    @functools.cached_property
    def _layout(self) -> Callable[[str, Tensor], Mapping[str, Tensor]]:
        config = self._worker.vllm_config.model_config
        return file_layout(config.hf_config, config.trust_remote_code, folder=Path(config.model))

    def end(self, version: str) -> None:
        """Finish the weight sync. Raise an error if vLLM left a parameter unset."""
        update, self._update = self._update, None
        assert update is not None
        update.end()
        self._version = version

    def abort(self) -> None:
        """Cancel an unfinished weight sync. Otherwise partially loaded layers would ignore weights of the next one."""
        update, self._update = self._update, None
        if update is not None:
            update.abort()

    def digests(self) -> dict[str, Any]:
        """Return the checksums of the stored weights.

        For a weight that vLLM fuses, shards or packs, this is the checksum of the received tensor.
        """
        unsharded = self._worker.vllm_config.parallel_config.tensor_parallel_size == 1
        stored_digests = workarounds.parameter_digests(self._shapes, unsharded)(self._worker.get_model())
        digests = {
            name: stored_digests.get(self._canonical_names[name], value)
            for name, value in self._received_digests.items()
        }
        return self.state() | {"digests": digests}

    def free_kv_cache(self) -> None:
        self._cache_sizes = workarounds.free_kv_cache(SimpleNamespace(worker=self._worker))

    def restore_kv_cache(self) -> None:
        workarounds.restore_kv_cache(SimpleNamespace(worker=self._worker), self._cache_sizes)


class _WeightUpdate:
    """One weight sync through vLLM's layerwise reload. It spans several requests."""

    def __init__(self, worker: Any, handle: dict[str, Any]):
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            initialize_layerwise_reload,
        )

        self._worker, self._model = worker, worker.get_model()
        self._missing_names = {name for name, _ in self._model.named_parameters()}
        # Rank 0 of the broadcast group is the trainer.
        self._receiver = open_receiver(handle, worker.rank + 1, worker.device)
        self._assembler = Assembler(self._receiver.device)
        with self._reload_context():
            initialize_layerwise_reload(self._model)

    def load(self, bucket: Bucket, record: Any) -> None:
        with self._reload_context():
            data = self._receiver.pull(bucket.buffer, bucket.num_bytes)
            weights = self._assembler.unpack(bucket.pieces, data)
            self._missing_names -= self._model.load_weights(record(weights)) or set()

    def end(self) -> None:
        try:
            self._assembler.finish()
        finally:
            self.abort()
        if self._missing_names:
            names = ", ".join(sorted(self._missing_names)[:8])
            raise RolloutError(f"vLLM did not load all weights: missing {names}")

    def abort(self) -> None:
        with self._reload_context():
            workarounds.finish_reload(self._worker.vllm_config.model_config)(self._model)
            workarounds.repack_tied_head(self._model)
            workarounds.repack_experts(self._model)

    @contextlib.contextmanager
    def _reload_context(self) -> Iterator[None]:
        """Set the context that vLLM requires to build or load layers."""
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]

        with set_current_vllm_config(self._worker.vllm_config), workarounds.capture_reload_warnings():
            yield
