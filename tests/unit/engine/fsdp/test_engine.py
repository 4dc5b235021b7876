"""Properties of the sharded engine beyond the contract: dropout over ranks, FSDP units, early saves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_warm_ranks
from torch.distributed.utils import _to_kwargs

from camshaft.contracts.engine.harness import EngineHarness
from camshaft.engine import StepContext, engine_class
from camshaft.errors import EngineError
from camshaft.models.packed import OpaqueTensor


def _dropout(folder: str, options: dict[str, Any]) -> tuple[list[float], float]:
    """Return (losses with dropout, this rank's next random number)."""
    harness = EngineHarness(
        engine_class("fsdp2"), folder, common_fields={"options": options, "override_config": {"attention_dropout": 0.3}}
    )
    engine = harness.build()
    losses = [harness.step(engine, harness.batch).loss for _ in range(2)]
    return losses, float(torch.rand(()))


def test_dropout_depends_on_seed_and_data_parallel_rank(tmp_path: Path) -> None:
    runs = [run_warm_ranks(_dropout, 2, str(tmp_path / name), {}) for name in ("a", "b")]
    assert runs[0] == runs[1]
    assert runs[0][0][1] != runs[0][1][1]


def test_ranks_that_share_a_matrix_product_draw_the_same(tmp_path: Path) -> None:
    first, second = run_warm_ranks(_dropout, 2, str(tmp_path), {"tensor_parallel_size": 2})
    assert first == second


def _saved_first(strategy: str, folder: str, save: bool) -> dict[str, torch.Tensor]:
    harness = EngineHarness(engine_class(strategy), folder)
    engine = harness.build()
    if save:
        engine.save_checkpoint(f"{folder}/before")
        engine = harness.build()
        engine.load_checkpoint(f"{folder}/before")
    for _ in range(2):
        harness.step(engine, harness.batch)
    return harness.weights(engine)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("fsdp1", marks=pytest.mark.slow)])
def test_a_checkpoint_before_the_first_update_changes_nothing(strategy: str, tmp_path: Path) -> None:
    still = run_warm_ranks(_saved_first, 2, strategy, str(tmp_path / "still"), False)[0]
    saved = run_warm_ranks(_saved_first, 2, strategy, str(tmp_path / "saved"), True)[0]
    assert all(torch.equal(weight, saved[name]) for name, weight in still.items())


def _skipped_first(strategy: str, folder: str) -> int:
    harness = EngineHarness(engine_class(strategy), folder)
    engine = harness.build()
    engine.set_loss_fn(lambda data, predictions, ctx: (predictions["log_probs"].values.sum() * float("nan"), ctx))
    with engine.train_mode():
        engine.train_batch(harness.batch)
    engine.save_checkpoint(f"{folder}/skipped")
    again = harness.build()
    again.load_checkpoint(f"{folder}/skipped")
    return again.skipped_steps


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("fsdp1", marks=pytest.mark.slow)])
def test_a_checkpoint_after_only_skipped_steps_is_valid(strategy: str, tmp_path: Path) -> None:
    assert run_warm_ranks(_skipped_first, 2, strategy, str(tmp_path)) == [1, 1]


def _wrapped(folder: str, name: str) -> None:
    EngineHarness(
        engine_class("fsdp2"),
        folder,
        common_fields={"options": {"wrap_policy": {"transformer_layer_cls_to_wrap": name}}},
    ).build()


def test_an_unknown_layer_class_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"contains Qwen9Layer, but .* has no such module; its layer classes are Qwen2DecoderLayer"
    ):
        run_warm_ranks(_wrapped, 2, str(tmp_path), "Qwen9Layer")


def test_a_bfloat16_divergence_uses_the_other_models_log_probs(tmp_path: Path) -> None:
    """The model computes in bfloat16, but does not round the distributions of the other model to bfloat16."""
    harness = EngineHarness(
        engine_class("fsdp2"), tmp_path, common_fields={"options": {"mixed_precision": {"param_dtype": "bfloat16"}}}
    )
    predictions: Any = harness.infer(harness.build(), StepContext(outputs=("distribution", "full_kl")))
    log_p, log_q = predictions["distribution"].values, harness.batch["log_q"].values
    expected = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    torch.testing.assert_close(
        predictions["full_kl"].values, expected * harness.batch["loss_mask"].values, rtol=1e-5, atol=1e-5
    )


def test_host_arguments_are_not_sent_to_the_device() -> None:
    """Count the calls of the function with which FSDP moves the arguments of a model."""
    moved, _ = _to_kwargs((torch.ones(2), OpaqueTensor(torch.ones(2))), {}, torch.device("meta"), False)
    moved_args, kept = moved[0]
    assert moved_args.device.type == "meta"
    assert kept.tensor.device.type == "cpu"
