"""Losses that are sums over tokens, compared with hand-worked numbers."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from camshaft.algorithms.token_losses import LOSSES
from camshaft.dataproto import DataProto, Ragged

RATIOS = [1.5, 0.5, 1.1, 1.5, 0.5, 9.0]
ADVANTAGES = [2.0, 2.0, -1.0, -1.0, -1.0, 0.0]
OLD = [-2.0] * 6
"""Three tokens in each of two rows; the first token of a row is the prompt, which is not counted."""
LENGTHS = [4, 4]
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def column(values: list[float], filler: float) -> Ragged:
    """Return two rows of three values, each with a first token that is not counted."""
    rows = [[filler, *values[:3]], [filler, *values[3:]]]
    return Ragged.from_rows([torch.tensor(row, dtype=torch.float64) for row in rows])


def run(name: str, options: Mapping[str, float] | None = None, **columns: list[float]) -> tuple[float, list[float]]:
    """Return the loss, and its gradient by the log-prob of each counted token. What is not counted is NaN."""
    logs = [old + math.log(ratio) for old, ratio in zip(OLD, RATIOS, strict=True)]
    log_probs = column(logs, math.nan).map(Tensor.requires_grad_)
    mask = column([1.0] * 6, 0.0).map(Tensor.bool)
    data = DataProto.from_dict({"loss_mask": mask, **{key: column(v, math.nan) for key, v in columns.items()}})
    loss, ctx = LOSSES[name].bind(options)(data, {"target_log_probs": log_probs}, {})
    assert ctx == {"loss_is_sum": True}
    (gradient,) = torch.autograd.grad(loss, log_probs.values)
    assert gradient[[0, 4]].tolist() == [0, 0]
    return loss.item(), gradient[[1, 2, 3, 5, 6, 7]].tolist()


def check(result: tuple[float, list[float]], loss: float, gradient: list[float]) -> None:
    assert result[0] == pytest.approx(loss, rel=1e-12, abs=1e-12)
    assert result[1] == pytest.approx(gradient, rel=1e-12, abs=1e-12)


def test_cross_entropy_weighs_each_log_prob_with_any_sign() -> None:
    weights = [1.0, 0.5, 0.0, -2.0, 3.0, 1.0]
    logs = [math.log(ratio) - 2 for ratio in RATIOS]
    loss = -sum(weight * log for weight, log in zip(weights, logs, strict=True))
    check(run("cross_entropy", weights=weights), loss, [-weight for weight in weights])
    check(run("cross_entropy"), -sum(logs), [-1.0] * 6)


def test_importance_sampling_by_hand() -> None:
    # -A r: -3, -1, 1.1, 1.5, 0.5, 0; the derivative of r is r.
    expected = [-3.0, -1.0, 1.1, 1.5, 0.5, 0.0]
    check(run("importance_sampling", logprobs=OLD, advantages=ADVANTAGES), sum(expected), expected)


def test_ppo_by_hand() -> None:
    # -min(r A, clip(r) A): for A > 0, 1.5 is clipped to 1.2; for A < 0, 0.5 to 0.8. The others keep their gradient.
    result = run("ppo", logprobs=OLD, advantages=ADVANTAGES)
    check(result, -2.4 - 1.0 + 1.1 + 1.5 + 0.8, [0.0, -1.0, 1.1, 1.5, 0.0, 0.0])
    wide = run("ppo", {"clip_high_threshold": 2.0, "clip_low_threshold": 0.6}, logprobs=OLD, advantages=ADVANTAGES)
    check(wide, -3.0 - 1.0 + 1.1 + 1.5 + 0.6, [-3.0, -1.0, 1.1, 1.5, 0.0, 0.0])


def test_cispo_by_hand() -> None:
    # The clipped ratios 1.2, 0.8, 1.1, 1.2, 0.8 times -A are constants in front of log pi.
    factors = [-2.4, -1.6, 1.1, 1.2, 0.8, 0.0]
    loss = sum(factor * (math.log(ratio) - 2) for factor, ratio in zip(factors, RATIOS, strict=True))
    check(run("cispo", logprobs=OLD, advantages=ADVANTAGES), loss, factors)


def test_dro_by_hand() -> None:
    # -(A log pi - beta / 2 d^2) with d = log r; the gradient is -A + beta d, also where A is 0.
    logs = [math.log(ratio) for ratio in RATIOS]
    terms = [0.05 * d * d - a * (d - 2) for d, a in zip(logs, ADVANTAGES, strict=True)]
    gradient = [0.1 * d - a for d, a in zip(logs, ADVANTAGES, strict=True)]
    check(run("dro", {"beta": 0.1}, logprobs=OLD, advantages=ADVANTAGES), sum(terms), gradient)


def test_gspo_by_hand() -> None:
    # Row 1: s = sqrt(1.5 * 0.5), clipped up to 0.9 for A < 0 only. Row 2: s = sqrt(1.5 * 9), clipped for A > 0 only.
    mask, advantages = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0], [2.0, 0.0, -1.0, 2.0, -1.0, 0.0]
    options = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
    columns = {"logprobs": OLD, "advantages": advantages, "sequence_ratio_mask": mask}
    first, second = math.sqrt(0.75), math.sqrt(13.5)
    gradient = [-2 * first, 0.0, 0.0, 0.0, second, 0.0]
    check(run("gspo", options, **columns), -2 * first + 0.9 - 2 * 1.3 + second, gradient)


def test_gspo_of_a_row_without_mask_has_ratio_one() -> None:
    columns = {"logprobs": OLD, "advantages": ADVANTAGES, "sequence_ratio_mask": [0.0] * 6}
    check(run("gspo", CLIP, **columns), -sum(ADVANTAGES), [-a for a in ADVANTAGES])


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_an_overflowing_ratio_without_advantage_does_not_count(name: str) -> None:
    far = [-2000.0, *OLD[1:]]
    columns = {"logprobs": far, "advantages": [0.0, *ADVANTAGES[1:]]}
    columns |= {"sequence_ratio_mask": [0.0, 1, 1, 1, 1, 1]} if name == "gspo" else {}
    loss, gradient = run(name, CLIP if name != "importance_sampling" else None, **columns)
    assert math.isfinite(loss)
    assert gradient[0] == 0
    assert all(map(math.isfinite, gradient))


def test_log_probs_of_the_input_are_used_without_targets() -> None:
    ids = Ragged.from_rows([[1, 2, 3]])
    data = DataProto.from_dict({"loss_mask": ids.like(torch.tensor([False, True, True]))})
    log_probs = ids.like(torch.tensor([0.0, -1.0, -3.0]))
    loss, _ = LOSSES["cross_entropy"].bind()(data, {"log_probs": log_probs}, {})
    assert float(loss) == 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "ppo",
            {"clip_low": 0.5},
            "loss ppo has no option 'clip_low'; its options are clip_low_threshold, clip_high_t",
        ),
        ("importance_sampling", {"beta": 1.0}, "loss importance_sampling has no option 'beta'; it has no options"),
        ("dro", {}, "loss dro requires the option 'beta'"),
        ("dro", {"beta": math.nan}, "loss dro: beta=nan is not a finite number"),
        ("cispo", {"clip_low_threshold": "0.5"}, "loss cispo: clip_low_threshold='0.5' is not a finite number"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold=1.3 is above clip_high_threshold=1.2"),
    ],
)
def test_a_wrong_option_is_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LOSSES[name].bind(options)


def test_a_missing_or_unknown_column_is_named() -> None:
    with pytest.raises(ValueError, match="loss ppo requires the column 'advantages'"):
        LOSSES["ppo"].check_columns(["logprobs"])
    with pytest.raises(ValueError, match="loss gspo requires the column 'sequence_ratio_mask'"):
        LOSSES["gspo"].check_columns(["logprobs", "advantages"])
    with pytest.raises(ValueError, match="loss cross_entropy does not read the column 'mask'; its columns are weights"):
        LOSSES["cross_entropy"].check_columns(["weights", "mask"])
    LOSSES["cross_entropy"].check_columns([])


def test_gspo_with_the_thresholds_of_ppo_warns() -> None:
    with pytest.warns(UserWarning, match=r"gspo uses clip_high_threshold=1\.2, the defaults of ppo"):
        LOSSES["gspo"].bind({"clip_low_threshold": 0.99})
    assert LOSSES["gspo"].notice(CLIP) is None
    assert LOSSES["ppo"].notice({}) is None
