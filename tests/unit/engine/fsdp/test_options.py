"""Each option of the sharded engine has its effect on the engine; the numbers stay the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_warm_ranks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from camshaft.contracts.engine.harness import EngineHarness
from camshaft.engine import engine_class, sharded
from camshaft.engine.fsdp import parallelize
from camshaft.engine.fsdp.engine import FSDPEngine


def built(folder: Path, **options: Any) -> tuple[EngineHarness, FSDPEngine]:
    harness = EngineHarness(engine_class("fsdp2"), folder, common_fields={"options": options})
    engine = harness.build()
    assert isinstance(engine, FSDPEngine)
    return harness, engine


def layers(engine: FSDPEngine) -> list[Any]:
    return list(engine.module.hf.model.layers)  # pyright: ignore


def stepped(harness: EngineHarness, engine: FSDPEngine, before_backward: Any = None) -> None:
    """Run forward and backward on the harness's batch."""
    loss_fn = harness.loss_fn("causal_lm")

    def watched(data: Any, predictions: Any, ctx: Any) -> Any:
        if before_backward is not None:
            before_backward()
        return loss_fn(data, predictions, ctx)

    engine.set_loss_fn(watched)
    with engine.train_mode():
        engine.forward_backward_step(harness.batch)


def units(engine: FSDPEngine) -> set[str]:
    return {name for name, module in engine.module.named_modules() if isinstance(module, FSDPModule)}


def test_units_are_layers_or_modules_by_class_or_size(tmp_path: Path) -> None:
    default_units = units(built(tmp_path)[1])
    assert {name.rpartition(".")[2] for name in default_units} == {"", "0", "1"}
    by_class = units(built(tmp_path, wrap_policy={"transformer_layer_cls_to_wrap": "Qwen2MLP"})[1])
    assert {name.rpartition(".")[2] for name in by_class} == {"", "mlp"}
    by_size = units(built(tmp_path, wrap_policy={"min_num_params": 2000})[1])
    assert len(by_size) > len(default_units)


@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_weights_are_freed_or_kept_after_forward(tmp_path: Path, reshard: bool) -> None:
    harness, engine = built(tmp_path, reshard_after_forward=reshard)
    is_sharded: list[bool] = []
    stepped(harness, engine, lambda: is_sharded.extend(isinstance(p, DTensor) for p in layers(engine)[0].parameters()))
    assert is_sharded
    assert set(is_sharded) == {reshard}


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_next_layer_is_prefetched(tmp_path: Path, prefetch: bool) -> None:
    harness, engine = built(tmp_path, forward_prefetch=prefetch)
    first, second = layers(engine)
    prefetched: list[bool] = []
    first.self_attn.register_forward_pre_hook(
        lambda *_: prefetched.append(second._get_fsdp_state()._fsdp_param_group._all_gather_result is not None)
    )
    stepped(harness, engine)
    assert prefetched == [prefetch]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_compute_in_the_configured_dtype(tmp_path: Path, dtype: str) -> None:
    harness, engine = built(tmp_path, mixed_precision={"param_dtype": dtype})
    dtypes: list[Any] = []
    layers(engine)[0].mlp.register_forward_pre_hook(
        lambda module, inputs: dtypes.extend((inputs[0].dtype, module.up_proj.weight.dtype))
    )
    stepped(harness, engine)
    assert set(dtypes) == {getattr(torch, dtype)}
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_reduced_in_the_configured_dtype(tmp_path: Path, dtype: str) -> None:
    harness, engine = built(tmp_path, mixed_precision={"reduce_dtype": dtype})
    stepped(harness, engine)
    gradients = [p.grad.to_local() for p in layers(engine)[0].parameters()]
    rounded = all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)
    assert rounded == (dtype == "bfloat16")


def offloaded(engine: FSDPEngine) -> set[str]:
    """Return the parts of the engine that are on the meta device."""
    states = [value for state in engine.optimizer.state.values() for name, value in state.items() if name != "step"]
    tensors = {
        "param_offload": list(engine.module.parameters()),
        "grad_offload": [p.grad for p in engine.module.parameters() if p.grad is not None]
        + list(engine.parts._offloaded_gradients.values()),
        "optimizer_offload": states,
    }
    assert all(len({tensor.device for tensor in part}) <= 1 for part in tensors.values())
    return {name for name, part in tensors.items() if part and part[0].device.type == "meta"}


@pytest.fixture
def host_is_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload to the meta device, because host and compute device are the same on a CPU."""
    monkeypatch.setattr("camshaft.engine.offload.HOST", torch.device("meta"))


@pytest.mark.usefixtures("host_is_meta")
@pytest.mark.parametrize("option", [None, "param_offload", "grad_offload", "optimizer_offload"])
def test_offloaded_parts_match_the_config(tmp_path: Path, option: str | None) -> None:
    harness, engine = built(tmp_path, **({} if option is None else {option: True}))
    if option == "param_offload":
        assert offloaded(engine) == {option}
        return  # the meta device stores no values, so nothing can be loaded from it
    stepped(harness, engine)
    assert offloaded(engine) == ({option} if option == "grad_offload" else set())
    if option != "grad_offload":
        engine.optimizer_step()
        assert offloaded(engine) == (set() if option is None else {option})


@pytest.mark.usefixtures("host_is_meta")
def test_eval_mode_does_not_load_the_optimizer_state(tmp_path: Path) -> None:
    harness, engine = built(tmp_path, optimizer_offload=True)
    stepped(harness, engine)
    engine.optimizer_step()
    with engine.eval_mode():
        engine.forward_backward_step(harness.batch, forward_only=True)
        assert offloaded(engine) == {"optimizer_offload"}
    with pytest.raises(NotImplementedError, match="meta"), engine.train_mode():
        pass


def test_with_the_policy_units_live_in_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Any] = []
    real = parallelize.fully_shard
    monkeypatch.setattr(
        parallelize,
        "fully_shard",
        lambda module, **words: (devices.append(type(words["offload_policy"]).__name__), real(module, **words)),
    )
    built(tmp_path)
    built(tmp_path, offload_policy=True)
    assert devices == ["OffloadPolicy"] * 3 + ["CPUOffloadPolicy"] * 3


@pytest.mark.parametrize("offload", [False, True])
def test_activations_of_a_training_step_are_offloaded(
    tmp_path: Path, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []
    real = sharded.offload_activations

    @contextmanager
    def watched(device: torch.device) -> Iterator[None]:
        entered.append(1)
        with real(device):
            yield

    monkeypatch.setattr(sharded, "offload_activations", watched)
    harness, engine = built(tmp_path, activation_offload=offload)
    harness.infer(engine)
    assert not entered
    stepped(harness, engine)
    assert len(entered) == offload


@pytest.mark.parametrize("compiled", [False, True])
def test_each_layer_is_compiled(tmp_path: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are compiled, observed without running the compiler; `make test-matrix` runs it, which takes a minute."""
    calls: list[str] = []

    def compiler(function: Any, dynamic: bool) -> Any:
        assert dynamic, "rows have any length"

        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(type(function.__self__).__name__)
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compiler)
    harness, engine = built(tmp_path, use_torch_compile=compiled)
    stepped(harness, engine)
    assert len(calls) == (2 if compiled else 0)


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_written_in_the_background(
    tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    real = sharded.checkpoint.BackgroundSave.start

    def watched(saving: Any, state: Any, local_path: str, **options: Any) -> None:
        started.append(Path(local_path).name)
        real(saving, state, local_path, **options)

    monkeypatch.setattr(sharded.checkpoint.BackgroundSave, "start", watched)
    _, engine = built(tmp_path, async_save=background)
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.wait_for_checkpoint()
    assert started == (["saved"] if background else [])
    assert (tmp_path / "saved").is_dir()


def _laid_out(folder: str, options: dict[str, Any]) -> tuple[int, float]:
    """Return (ranks with separate rows, this rank's share of a layer's matrix)."""
    _, engine = built(Path(folder), **options)
    weight = layers(engine)[0].mlp.up_proj.weight
    return engine.seat.dp_size, weight.to_local().numel() / (32 * layers(engine)[0].mlp.intermediate_size)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2, 0.5)),
        ({"fsdp_size": 1}, (2, 1.0)),
        ({"ulysses_sequence_parallel_size": 2}, (1, 0.5)),
        ({"tensor_parallel_size": 2}, (1, 0.5)),
    ],
)
def test_ranks_share_weights_and_rows_by_config(
    tmp_path: Path, options: dict[str, Any], expected: tuple[int, float]
) -> None:
    assert run_warm_ranks(_laid_out, 2, str(tmp_path), options) == [expected, expected]
