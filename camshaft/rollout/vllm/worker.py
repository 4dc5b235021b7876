"""Inside a worker of vLLM's server: weights of a trainer come in, digests of them go out.

    vllm serve ... --worker-extension-cls camshaft.rollout.vllm.worker.WorkerExtension

vLLM imports this file by its name and adds `Served` to its workers. Each request is `POST /collective_rpc` with the
method `camshaft`, a word and JSON; its answer is {"done": ...}, {"refused": text} for what was to be expected, or
{"failed": stack}. `server_rollout` is the other side. A server that was started anew has another identity.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from camshaft.digest import noted
from camshaft.errors import RolloutError
from camshaft.rollout.vllm import workarounds
from camshaft.rollout.weights.buckets import Assembler, Piece
from camshaft.rollout.weights.checks import drop_tied_duplicates
from camshaft.rollout.weights.transport import open_receiver


class WorkerExtension:
    """What is added to a worker."""

    def camshaft(self, what: str, payload: str = "{}") -> dict[str, Any]:
        """Do what the trainer asks for; vLLM would make less of an exception than of an answer that tells it."""
        weights: WorkerWeights = vars(self).setdefault("_camshaft_weights", WorkerWeights(self))
        methods = {
            method.__name__: method
            for method in (
                weights.hello, weights.state, weights.begin, weights.bucket, weights.end, weights.abort,
                weights.digests, weights.free_kv_cache, weights.restore_kv_cache,
            )
        }  # fmt: skip
        try:
            return {"done": methods[what](**json.loads(payload))}
        except RolloutError as error:
            return {"refused": str(error)}
        except Exception:
            return {"failed": traceback.format_exc().rstrip()}


class WorkerWeights:
    """The weights of one worker, and where they came from."""

    def __init__(self, worker: Any):
        self._worker = worker
        self._identity = secrets.token_hex(8)
        self._version: str | None = None
        self._came: dict[str, int] = {}
        self._own: Mapping[str, str] = {}
        self._passed: set[str] = set()
        self._shapes: dict[str, Tensor] = {}
        self._update: _WeightUpdate | None = None
        self._cache_sizes: list[int] = []

    def hello(self) -> dict[str, Any]:
        """Who this is, and what the trainer has to know of it."""
        import vllm  # pyright: ignore[reportMissingImports]

        config = self._worker.vllm_config.model_config
        return self.state() | {
            "vllm": vllm.__version__,  # pyright: ignore[reportAttributeAccessIssue]
            "logprobs_mode": str(config.logprobs_mode),
            "generation_config": str(config.generation_config),
            "max_model_len": int(config.max_model_len),
            "dtype": str(config.dtype).removeprefix("torch."),
        }

    def state(self) -> dict[str, Any]:
        return {"identity": self._identity, "version": self._version}

    # -- weights ----------------------------------------------------------------------------------

    def begin(self, handle: dict[str, Any], own: dict[str, str], shapes: dict[str, Any]) -> None:
        """A hand-over begins; from here to its end there are no weights.

        `own` has the name under which vLLM takes each weight, `shapes` the dtype and shape of each.
        """
        self.abort()
        self._version, self._came, self._own, self._passed = None, {}, own, set()
        self._shapes = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in shapes.items()
        }
        self._update = _WeightUpdate(self._worker, handle)

    def bucket(self, pieces: list[dict[str, Any]], used: int) -> None:
        assert self._update is not None
        self._update.take([Piece(**piece) for piece in pieces], used, self._passed_on)

    def _passed_on(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return drop_tied_duplicates(noted(weights, self._came), self._own, self._passed)

    def end(self, version: str) -> None:
        """All weights came; a parameter that vLLM found nothing for is an error."""
        update, self._update = self._update, None
        assert update is not None
        update.end()
        self._version = version

    def abort(self) -> None:
        """Half-loaded layers would count what came, and take later weights for superfluous."""
        update, self._update = self._update, None
        if update is not None:
            update.abort()

    def digests(self) -> dict[str, Any]:
        """Of what vLLM holds as it came, and for what it fuses, splits or packs, of what arrived here."""
        whole = self._worker.vllm_config.parallel_config.tensor_parallel_size == 1
        held = workarounds.parameter_digests(self._shapes, whole)(self._worker.get_model())
        digests = {name: held.get(self._own[name], arrived) for name, arrived in self._came.items()}
        return self.state() | {"digests": digests}

    # -- memory -----------------------------------------------------------------------------------

    def free_kv_cache(self) -> None:
        self._cache_sizes = workarounds.free_kv_cache(SimpleNamespace(worker=self._worker))

    def restore_kv_cache(self) -> None:
        workarounds.restore_kv_cache(SimpleNamespace(worker=self._worker), self._cache_sizes)


class _WeightUpdate:
    """One hand-over, as vLLM's own weight transfer does it: layer by layer, in as many calls as it takes."""

    def __init__(self, worker: Any, handle: dict[str, Any]):
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            initialize_layerwise_reload,
        )

        self._worker, self._model = worker, worker.get_model()
        self._missing = {name for name, _ in self._model.named_parameters()}
        # The weights of a broadcast come over a group of all workers.
        self._receiver = open_receiver(handle, rank=worker.rank + 1)
        self._assembler = Assembler("cpu")
        with self._inside():
            initialize_layerwise_reload(self._model)

    def take(self, pieces: Sequence[Piece], used: int, passed_on: Any) -> None:
        with self._inside():
            arrived = self._assembler.take(pieces, self._receiver.pull(used))
            self._missing -= self._model.load_weights(passed_on(arrived)) or set()

    def end(self) -> None:
        finished = False
        try:
            self._assembler.finish()
            finished = True
        finally:
            self.abort()
        if finished and self._missing:
            some = ", ".join(sorted(self._missing)[:8])
            raise RolloutError(f"vLLM did not take all weights: nothing came for {some}")

    def abort(self) -> None:
        with self._inside():
            workarounds.finish_reload(self._worker.vllm_config.model_config)(self._model)
            workarounds.repack_tied_head(self._model)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """What vLLM wants around anything that builds or loads layers."""
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]

        with set_current_vllm_config(self._worker.vllm_config), workarounds.capture_reload_warnings():
            yield
