from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_warm_ranks
from support.tiny import predicted_tokens, tiny_folder, tiny_rows
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from camshaft.config import EngineModel
from camshaft.errors import EngineError
from camshaft.models.activations import offload_activations
from camshaft.models.loader import load_model
from camshaft.models.packed import PackedModel
from camshaft.models.packing import Packing

LENGTHS = [50, 40, 70]
RECOMPUTING: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"enable_gradient_checkpointing": True},
    "selective": {"enable_gradient_checkpointing": True, "gradient_checkpointing_mode": "selective"},
}


def source() -> str:
    return str(tiny_folder(hidden=64, layers=3))


def packed(path: str | None = None, **changes: Any) -> PackedModel:
    return load_model(EngineModel(path=path or source(), **changes), "float32", "cpu", seed=0).train()


def run(model: PackedModel) -> Tensor:
    torch.manual_seed(1)
    out = model(torch.cat(tiny_rows(LENGTHS)), Packing(LENGTHS), predicted_tokens(LENGTHS), ("log_probs", "entropy"))
    return out["log_probs"].sum() + out["entropy"].square().sum()


def gradients(model: PackedModel) -> dict[str, Tensor]:
    by_name = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return by_name


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


# -- recomputation --------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputation_changes_no_gradient(dropout: float) -> None:
    results = {}
    for name, changes in RECOMPUTING.items():
        model = packed(override_config={"attention_dropout": dropout}, **changes)
        run(model).backward()
        results[name] = gradients(model)
    assert results["none"]
    assert same(results["full"], results["none"])
    assert same(results["selective"], results["none"])


class Products(TorchDispatchMode):
    """Count executed matrix products and attention calls, below any mechanism that could skip them."""

    names = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in self.names
        return func(*args, **(kwargs or {}))


def allocated_bytes(action: Callable[[], Any]) -> tuple[Any, int]:
    """Return (result, bytes that torch's allocator handed out and did not get back)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = action()
    events: Any = profiler.events()
    return result, sum(event.self_cpu_memory_usage for event in events)


def test_selective_checkpointing_recomputes_no_matrix_product() -> None:
    kept, backward = {}, {}
    for name, changes in RECOMPUTING.items():
        model = packed(**changes)
        with Products() as forward:
            loss = run(model)
        assert forward.count >= 3 * 8  # per layer: four projections, three of the feed-forward part, attention
        with Products() as products:
            loss.backward()
        backward[name] = products.count
        model.zero_grad()
        loss, kept[name] = allocated_bytes(lambda m=model: run(m))
        loss.backward()
    assert 2 * kept["full"] < kept["selective"] < 0.75 * kept["none"]
    assert backward["selective"] == backward["none"]
    assert backward["full"] >= backward["none"] + 3 * 7


def test_a_model_without_checkpointing_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed()
    monkeypatch.setattr(type(model.hf), "supports_gradient_checkpointing", False)
    with pytest.raises(EngineError, match="does not support gradient checkpointing"):
        model.enable_gradient_checkpointing("selective")


# -- offload --------------------------------------------------------------------------------------


class SavedTensorHooks:
    """Observe the code that saves tensors for the backward pass."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.moved, self.kept, self.back = model, [], [], 0
        self.parameters_seen = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        original = torch.autograd.graph.saved_tensors_hooks

        def hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
            return original(lambda t: self.pack(pack, t), lambda kept: self.unpack(unpack, kept))

        torch.autograd.graph.saved_tensors_hooks = hooks
        try:
            with offload_activations("cpu", min_bytes=1024):
                torch.autograd.graph.saved_tensors_hooks = original
                yield
        finally:
            torch.autograd.graph.saved_tensors_hooks = original

    def pack(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        kept = pack(tensor)
        parameters = [p for p in self.model.parameters() if not isinstance(p, DTensor)]  # gathered by FSDP2
        if not isinstance(tensor, DTensor):
            storages = {p.untyped_storage().data_ptr() for p in parameters}
            if tensor.untyped_storage().data_ptr() in storages:
                self.parameters_seen += 1
                assert isinstance(kept, Tensor), f"a parameter of shape {tuple(tensor.shape)} was copied"
        (self.kept if isinstance(kept, Tensor) else self.moved).append(tensor.nbytes)
        return kept

    def unpack(self, unpack: Callable[[Any], Tensor], kept: Any) -> Tensor:
        self.back += not isinstance(kept, Tensor)
        return unpack(kept)


@pytest.mark.parametrize("recomputing", RECOMPUTING)
def test_activation_offload_keeps_gradients_bitwise(recomputing: str) -> None:
    model = packed(**RECOMPUTING[recomputing])
    run(model).backward()
    expected = gradients(model)
    watched = SavedTensorHooks(model)
    with watched():
        loss = run(model)
    assert watched.back == 0
    loss.backward()
    assert same(gradients(model), expected)
    assert watched.back == len(watched.moved) >= 3
    assert sum(watched.moved) >= 3 * sum(LENGTHS) * 64 * 4  # at least the input of each layer
    assert min(watched.moved) >= 1024
    assert watched.parameters_seen


def test_saved_tensors_are_independent_of_later_changes() -> None:
    x = torch.randn(40, 40, requires_grad=True)
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[::2], lambda t: t[:, 3:]):
        with offload_activations("cpu", min_bytes=1):
            hidden = x * 1.0
            out = view(hidden).sin().square().sum()
        out.backward()
        expected = torch.zeros_like(x)
        view(expected).copy_(torch.sin(2 * view(x.detach())))
        torch.testing.assert_close(x.grad, expected)
        x.grad = None


def test_nothing_keeps_the_graph_alive() -> None:
    # exp saves its result: a hook that returned that tensor would create a reference cycle in the graph.
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        for min_bytes in (1, 1 << 30):
            x = torch.ones(8, requires_grad=True)
            with offload_activations("cpu", min_bytes):
                y = x.exp()
            reference = weakref.ref(y)
            del y
            assert reference() is None
    finally:
        gc.enable()


# -- over ranks -----------------------------------------------------------------------------------


def sharded_gradients(path: str, recomputing: str) -> tuple[bool, int, int]:
    """Return (gradients are bit-identical with offload, bytes moved, parameters seen by the hooks)."""
    model = packed(path, **RECOMPUTING[recomputing])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base: Any = model.hf.base_model
    for layer in base.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    results = []
    watched = SavedTensorHooks(model)
    for offloaded in (nullcontext, watched):
        with offloaded():
            loss = run(model)
        loss.backward()
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}
        model.zero_grad()
        results.append(grads)
    assert len(results[0]) == len(list(model.parameters()))
    return same(results[1], results[0]), sum(watched.moved), watched.parameters_seen


@pytest.mark.parametrize(
    "recomputing", [pytest.param(r, marks=[pytest.mark.slow] * (r != "selective")) for r in RECOMPUTING]
)
def test_sharded_models_keep_gradients_and_gathered_layers(recomputing: str) -> None:
    for equal, moved, parameters in run_warm_ranks(sharded_gradients, 2, source(), recomputing):
        assert equal
        assert moved >= 3 * sum(LENGTHS) * 64 * 4
        assert parameters


def tensor_parallel_gradients() -> bool:
    """DTensor activations, sharded and replicated, keep their placement when they are moved and restored."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    random = torch.Generator().manual_seed(0)
    up, down, x = (torch.randn(shape, generator=random) for shape in ((32, 64), (64, 32), (50, 32)))
    results = []
    for offloaded in (nullcontext(), offload_activations("cpu", min_bytes=1)):
        weights = [distribute_tensor(up, mesh, [Shard(1)]), distribute_tensor(down, mesh, [Shard(0)])]
        first, second = (torch.nn.Parameter(w) for w in weights)
        with offloaded:
            hidden = distribute_tensor(x, mesh, [Replicate()]) @ first
            out: Any = torch.nn.functional.silu(hidden) @ second
            loss = out.redistribute(placements=[Replicate()]).square().sum()
        loss.backward()
        results.append([first.grad.full_tensor(), second.grad.full_tensor()])  # pyright: ignore
    weights_of_one_process = [w.clone().requires_grad_() for w in (up, down)]
    (torch.nn.functional.silu(x @ weights_of_one_process[0]) @ weights_of_one_process[1]).square().sum().backward()
    for gradient, weight in zip(results[0], weights_of_one_process, strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-4, atol=1e-2)
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_offload_restores_tensor_parallel_activations() -> None:
    assert run_warm_ranks(tensor_parallel_gradients, 2) == [True, True]
