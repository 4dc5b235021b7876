"""Selection of tokens over mini-batches, and runs with it and with a target for the entropy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import run_ppo

from camshaft.algorithms import covariances
from camshaft.config.schema.policy_loss import PolicyLossConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.trainer.mini_batches import TokenSelection, sampling_seeds, shard_rows

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
ROWS = 8


def batch_of() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    responses = Ragged.from_rows([torch.arange(3, 3 + n) for n in (4, 6, 1, 3, 3, 7, 2, 5)])

    def numbers() -> Ragged:
        return responses.like(torch.randn(len(responses.values), dtype=torch.float64, generator=generator))

    mask = responses.like(torch.rand(len(responses.values), generator=generator) < 0.8)
    named = {name: numbers() for name in ("old_log_probs", "advantages", "entropy")}
    seeds = sampling_seeds(1, 2, ROWS)
    return DataProto.from_dict({"responses": responses, "response_mask": mask, "sampling_seed": seeds, **named})


def selected(loss: Mapping[str, Any], dp_size: int, name: str, epochs: int = 1) -> list[dict[int, list[bool]]]:
    """Return the tokens of each row that a selection selects, in each mini-batch of four rows."""
    rows = shard_rows(ROWS, 4, epochs, 7, dp_size)
    columns = TokenSelection(PolicyLossConfig(**loss)).columns(batch_of(), rows, 4, dp_size)
    parts = torch.arange(len(rows)).view(dp_size, -1, 4 // dp_size).transpose(0, 1).flatten(1)
    values = columns[name].rows()
    return [{int(rows[position]): values[position].tolist() for position in part} for part in parts]


CASES = {
    "clip_cov": ({"loss_mode": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_lb": 0.0}, "selected_tokens"),
    "kl_cov": ({"loss_mode": "kl_cov", "kl_cov_ratio": 0.3}, "selected_tokens"),
    "entropy": ({"top_entropy_quantile": 0.4}, "high_entropy"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_selection_does_not_depend_on_the_number_of_ranks(case: str) -> None:
    loss, name = CASES[case]
    one = selected(loss, 1, name, epochs=2)
    assert one == selected(loss, 2, name, epochs=2) == selected(loss, 4, name, epochs=2)
    assert all(any(map(any, part.values())) for part in one)


def test_largest_covariances_of_a_mini_batch_are_selected() -> None:
    batch = batch_of()
    for part in selected(CASES["kl_cov"][0], 2, "selected_tokens"):
        rows = batch.reorder(sorted(part))
        mask = rows["response_mask"].values
        covariance = covariances(rows["old_log_probs"].values, rows["advantages"].values, mask)
        taken = torch.tensor([token for row in sorted(part) for token in part[row]])
        assert int(taken.sum()) == int(0.3 * int(mask.sum()))
        assert not (taken & ~mask).any()
        assert covariance[taken].min() > covariance[mask & ~taken].max()


def test_random_tokens_differ_between_steps_but_not_between_epochs() -> None:
    loss = {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": -1e9, "clip_cov_ub": 1e9}
    selection, rows, batch = TokenSelection(PolicyLossConfig(**loss)), torch.arange(ROWS), batch_of()

    def tokens(step: int) -> list[bool]:
        seeded = batch.with_columns(sampling_seed=sampling_seeds(1, step, ROWS))
        return selection.columns(seeded, rows, ROWS, 1)["selected_tokens"].values.tolist()

    assert tokens(2) == tokens(2) != tokens(3)
    twice = selection.columns(batch, torch.cat([rows, rows]), ROWS, 1)["selected_tokens"].values
    assert twice[: len(twice) // 2].tolist() == twice[len(twice) // 2 :].tolist() == tokens(2)


def test_rejected_tokens_are_not_selected() -> None:
    batch = batch_of()
    accepted = batch.ragged("response_mask")
    batch = batch.with_columns(rollout_rs_mask=accepted.like(accepted.positions() == 0))
    selection = TokenSelection(PolicyLossConfig(top_entropy_quantile=0.5))
    column = selection.columns(batch, torch.arange(ROWS), ROWS, 1)["high_entropy"]
    assert column.values.any()
    assert not column.values[column.positions() > 0].any()


# -- runs -----------------------------------------------------------------------------------------

TARGET = {f"{ACTOR}.entropy_coeff": 0.0, f"{ACTOR}.entropy_target": 100.0, f"{ACTOR}.entropy_coeff_delta": 0.03}


def test_coefficient_rises_while_the_entropy_is_below_the_target(tmp_path: Path) -> None:
    steps = run_ppo(tmp_path, {**TARGET, f"{ACTOR}.entropy_coeff_max": 0.05}, steps=3)
    assert [step.metrics["actor/entropy_coeff"] for step in steps] == pytest.approx([0.0, 0.03, 0.05])
    (above,) = run_ppo(tmp_path, {**TARGET, f"{ACTOR}.entropy_target": 0.0}, steps=2)[1:]
    assert above.metrics["actor/entropy_coeff"] == 0
    assert above.actor["model.norm.weight"].tolist() != steps[1].actor["model.norm.weight"].tolist()


def test_coefficient_is_in_the_checkpoint(tmp_path: Path) -> None:
    saved = {**TARGET, "trainer.save_freq": 1, "trainer.resume_mode": "auto"}
    low = {f"{ACTOR}.entropy_coeff_min": -1.0}
    run_ppo(tmp_path, {**saved, **low}, steps=2)
    resumed = run_ppo(tmp_path, {**saved, **low}, steps=3)
    assert [step.metrics["actor/entropy_coeff"] for step in resumed] == pytest.approx([0.06])


def test_policy_loss_includes_the_tokens_of_high_entropy_only(tmp_path: Path) -> None:
    settings = {f"{ACTOR}.ppo_mini_batch_size": 8, f"{ACTOR}.entropy_coeff": 0.0}
    (all_tokens,) = run_ppo(tmp_path, settings, steps=1)
    (few,) = run_ppo(tmp_path, {**settings, f"{LOSS}.top_entropy_quantile": 0.2}, steps=1)
    assert 0 < few.metrics["actor/grad_norm"] < all_tokens.metrics["actor/grad_norm"]
    assert few.metrics["actor/entropy"] == pytest.approx(all_tokens.metrics["actor/entropy"], rel=1e-5)
