"""Each algorithm trains from the command line, with the same metrics in one process and on two ranks.

The two ranks are shared by all cases. In each case, the setting under test has an effect that the last line checks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import camshaft
from support.ppo_runs import ppo_args
from support.processes import start_fork_server
from support.same_run import ACTOR, MEASURED, RANKS, SHUFFLED, names
from support.shared_pool import shared_pool

from camshaft.algorithms import AGGREGATIONS, ESTIMATORS, KL_PENALTIES, POLICY_LOSSES
from camshaft.controller.local import PRELOAD
from camshaft.tracking.jsonl import read_metrics

Settings = dict[str, Any]

REWARD = """
def compute_score(solution_str):
    even = sum(character in "02468" for character in solution_str)
    return {"score": even / 8, "even": float(even > 1), "short": float(len(solution_str) < 6)}
"""
BASE: Settings = {
    **SHUFFLED,
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    "data.train_batch_size": 4,
    f"{ACTOR}.ppo_mini_batch_size": 2,
    "actor_rollout_ref.rollout.n": 4,
    "trainer.total_training_steps": 3,
    "trainer.logger": "[jsonl]",
}
"""Two mini-batches of eight responses in each of two epochs."""
NARROW: Settings = {f"{ACTOR}.clip_ratio": 3e-3}
"""A range that clips tokens in a small run."""
POLICY_LOSS, CORRECTION = f"{ACTOR}.policy_loss", "algorithm.rollout_correction"
# The distribution is truncated, so that weights differ from 1 by more than rounding.
TRUNCATED: Settings = {"actor_rollout_ref.rollout.top_p": 0.6}


def loss(name: str, **keys: Any) -> Settings:
    """Return the settings of a policy loss with keys of its section."""
    return {f"{POLICY_LOSS}.loss_mode": name} | {f"{POLICY_LOSS}.{key}": value for key, value in keys.items()}


def correction(**keys: Any) -> Settings:
    """Return the settings of a rollout correction of samples from a truncated distribution."""
    return TRUNCATED | {f"{CORRECTION}.{key}": value for key, value in keys.items()}


def bypass(**keys: Any) -> Settings:
    """Return the settings of a correction in the update."""
    return {f"{CORRECTION}.bypass_mode": True} | {f"{CORRECTION}.{key}": value for key, value in keys.items()}


LOSSES: dict[str, Settings] = {
    "vanilla": NARROW,
    "gspo": NARROW,
    "geo_mean": NARROW,
    "cispo": NARROW,
    "sapo": {},
    "dppo_tv": {f"{ACTOR}.clip_ratio": 1e-3},
    "dppo_kl": {f"{ACTOR}.clip_ratio": 1e-5},
    "gpg": {},
    "dro": loss("dro", dro_beta=0.1),
    "clip_cov": loss("clip_cov", clip_cov_ratio=0.2, clip_cov_lb=0.0),
    "kl_cov": loss("kl_cov", kl_cov_ratio=0.2, ppo_kl_coef=1.0),
}
PARTS: dict[str, Settings] = {
    "gae": {"algorithm.lam": 0.9},
    "gdpo": {"algorithm.gdpo_reward_keys": "[even,short]", "algorithm.gdpo_reward_weights": "[1,0.5]"},
    "optimal_token_baseline": correction(rollout_is="token"),
    "tir_optimal_token_baseline": {},
}
ENTROPY: dict[str, Settings] = {
    "entropy_target": {f"{ACTOR}.entropy_target": 3.0},
    "top_entropy_quantile": loss("vanilla", top_entropy_quantile=0.3),
}
WEIGHTS: dict[str, Settings] = {
    "token": correction(rollout_is="token", rollout_is_threshold=0.9),
    "token in a range": correction(rollout_is="token", rollout_is_threshold="0.3-0.9"),
    "sequence": correction(rollout_is="sequence", rollout_is_batch_normalize=True),
    "sequence in a range": correction(rollout_is="sequence", rollout_is_threshold="0.01-0.3"),
}
REJECTION: dict[str, Settings] = {
    "one rule": correction(rollout_rs="token_k1", rollout_rs_threshold="0.604-2.0"),
    "two rules": correction(rollout_rs="[seq_mean_k3,seq_max_k2]", rollout_rs_threshold="[0.06,0.09]"),
}
BYPASS: dict[str, Settings] = {
    "reinforce": bypass(loss_type="reinforce", rollout_is="token"),
    "reinforce normalized": bypass(loss_type="reinforce", rollout_is="sequence", rollout_is_batch_normalize=True),
    "reinforce in a range": bypass(loss_type="reinforce", rollout_is="token", rollout_is_threshold="0.999-1.001"),
    "ppo_clip with two rules": NARROW
    | bypass(rollout_rs="[token_k1,seq_max_k2]", rollout_rs_threshold="[0.99-1.01,1e-3]"),
}
CASES: dict[str, tuple[Settings, str]] = {
    **{f"loss {name}": (loss(name) | settings, "actor/ppo_kl") for name, settings in LOSSES.items()},
    **{
        f"aggregation {name}": ({f"{ACTOR}.loss_agg_mode": name}, "actor/grad_norm")
        for name in AGGREGATIONS
        if name != "token-mean"
    },
    **{
        f"estimator {name}": ({"algorithm.adv_estimator": name} | PARTS.get(name, {}), "actor/signal_share")
        for name in ESTIMATORS
        if name != "grpo"
    },
    **{
        f"KL loss {name}": (
            {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.1, f"{ACTOR}.kl_loss_type": name},
            "actor/kl_loss",
        )
        for name in KL_PENALTIES
    },
    **{f"entropy {name}": (settings, "actor/entropy") for name, settings in ENTROPY.items()},
    **{f"weights {name}": (settings, "rollout_corr/rollout_is_mean") for name, settings in WEIGHTS.items()},
    **{
        f"rejection {name}": (settings, "rollout_corr/rollout_rs_masked_fraction")
        for name, settings in REJECTION.items()
    },
    **{
        f"bypass {name}": (settings, f"actor/rollout_{'rs_masked_fraction' if 'rules' in name else 'is_mean'}")
        for name, settings in BYPASS.items()
    },
}
"""Settings of each case, and the metric of the last step that shows an effect."""
FAST = {"loss clip_cov", "estimator gdpo", "estimator optimal_token_baseline", "bypass reinforce normalized"}
"""Cases of `make test`; the others differ from them in functions that are tested on their own."""


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    start_fork_server(*PRELOAD, "camshaft.roles", "transformers.models.qwen2.modeling_qwen2")
    with shared_pool():
        yield


def test_each_policy_loss_has_settings() -> None:
    assert LOSSES.keys() == POLICY_LOSSES.keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in CASES])
def test_metrics_do_not_depend_on_the_number_of_ranks(name: str, home: Path) -> None:
    settings, shown = CASES[name]
    reward = home / "parts.py"
    reward.write_text(REWARD)
    runs: list[list[dict[str, float]]] = []
    for layout in ({}, RANKS):
        folder = home / name / f"run{len(runs)}"
        keys = BASE | {"custom_reward_function.path": reward} | settings | layout
        run = camshaft("ppo", *ppo_args(home, {**keys, "trainer.default_local_dir": folder}))
        assert run.status == 0, run.err
        runs.append(list(read_metrics(folder / "metrics.jsonl")))
    rounding = () if TRUNCATED.keys() <= settings.keys() else ("rollout_corr/",)
    assert len(runs[0]) == len(runs[1]) == 3
    for step, reference in zip(*runs, strict=True):
        assert names(step) == names(reference)
        for key, value in reference.items():
            if not key.startswith((*MEASURED, "timing/", *rounding)):
                assert step[key] == pytest.approx(value, rel=1e-6, abs=1e-7), key
    assert runs[0][-1][shown] != 0
