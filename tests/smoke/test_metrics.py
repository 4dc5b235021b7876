"""The table of metric names matches the metrics that runs log, in both directions."""

from pathlib import Path

import pytest
from support.command_line import camshaft, rm_args, sft_args
from support.ppo_runs import ppo_args, run_ppo
from support.reward_models import make_tiny_reward_model
from support.same_run import OF_RANKS

import camshaft as package
from camshaft.errors import ConfigError
from camshaft.models.tiny import make_tiny_model
from camshaft.tracking.jsonl import read_metrics
from camshaft.tracking.names import METRICS, SCREEN, explain, find, matches
from camshaft.trainer.metrics import RANK_REDUCTIONS

HOME = Path(package.__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"

OTHER_MODELS = ("/padding", "/moe/z_loss")
"""Ends of the names of metrics of models on right-padded rows, and of mixtures of experts on Megatron."""
OTHER_GENERATORS = {"rollout/prompt_tokens_cached", "rollout/http_retries"}
"""Logged by generators with separate processes or servers, which other tests cover. The tracker of the PPO runs here
records metrics in memory, and `timing/at` is part of the file only."""
EPISODES = {"agent/other_rows", "val-aux/agent/unplayed"}
"""Logged in runs with programs and in validations with episodes, which other tests cover."""

SCORED = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    right = float(solution_str == ground_truth)
    return {"score": right, "acc": right, "length": float(len(solution_str)), "pred": solution_str}
"""


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the metric names of each trainer from two runs: one with every optional metric, one with few."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "scored.py").write_text(SCORED)
    ppo_args(folder)
    make_tiny_reward_model(folder / "rm")
    rollout = "actor_rollout_ref.rollout"
    everything = {
        "custom_reward_function.path": folder / "scored.py",
        "reward_model.enable": True,
        "reward_model.model.path": folder / "rm",
        "reward_model.strategy": "reference",
        "reward_model.micro_batch_size_per_gpu": 4,
        "reward_model.overlong_buffer.enable": True,
        "reward_model.overlong_buffer.len": 4,
        "reward_model.overlong_buffer.log": True,
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_batch_normalize": True,
        "algorithm.rollout_correction.rollout_rs": "[token_k1,seq_mean_k1]",
        "algorithm.rollout_correction.rollout_rs_threshold": "2.0",
        "data.val_max_samples": 2,
        "trainer.test_freq": 1,
        f"{rollout}.val_kwargs.n": 4,
        f"{rollout}.val_kwargs.do_sample": True,
        f"{rollout}.val_kwargs.temperature": 1.0,
    }
    little = {"algorithm.adv_estimator": "grpo", f"{rollout}.n": 2, f"{rollout}.name": "hf"}
    filtered = {"algorithm.adv_estimator": "grpo", f"{rollout}.n": 4, "algorithm.filter_groups.enable": True}
    functions = {
        "custom_reward_function.functions": f"[{folder}/scored.py]",
        "custom_reward_function.path": "null",
        "data.val_max_samples": 2,
        "trainer.test_freq": 1,
    }
    model = {key: value for key, value in everything.items() if key.startswith("reward_model.") and "over" not in key}
    greedy = {"algorithm.adv_estimator": "remax", **functions, **model}
    experts = str(make_tiny_model(folder / "experts", family="mixtral", num_local_experts=4))
    routed = {
        "actor_rollout_ref.model.path": experts,
        "critic.model.path": experts,
        "actor_rollout_ref.actor.router_replay.mode": "R3",
    }
    correction, actor = "algorithm.rollout_correction", "actor_rollout_ref.actor"
    selecting = {f"{actor}.policy_loss.loss_mode": "clip_cov", f"{actor}.entropy_target": 1.0}
    ranged = {f"{correction}.rollout_is": "token", f"{correction}.rollout_is_threshold": "0.5-2.0"}
    bypassing = {
        f"{correction}.bypass_mode": True,
        f"{correction}.loss_type": "reinforce",
        f"{correction}.rollout_is": "token",
        f"{correction}.rollout_is_batch_normalize": True,
        f"{correction}.rollout_rs": "[token_k1,seq_mean_k1]",
        f"{correction}.rollout_rs_threshold": "2.0",
    }
    episodes = {
        "actor_rollout_ref.rollout.multi_turn.environment": EXAMPLES / "hint.py",
        "data.max_response_length": 16,
    }
    runs = (everything, little, filtered, greedy, routed, selecting, ranged, bypassing, episodes)
    ppo = [step for overrides in runs for step in run_ppo(folder, overrides, 1)]
    ppo += run_ppo(folder, {"async_training.max_staleness": 1, f"{correction}.bypass_mode": True}, 3)
    names = {"ppo": {name for step in ppo for name in step.metrics}}
    for trainer, make_args, rows in (("sft", sft_args, "sft_heldout"), ("rm", rm_args, "preference_heldout")):
        short = {
            "data.val_files": folder / "data" / f"{rows}.parquet",
            "trainer.test_freq": 1,
            "model.path": experts,
            "model.random_init": True,
        }
        assert camshaft(trainer, *make_args(folder, {**short, "trainer.total_training_steps": 1})).status == 0
        lines = read_metrics(folder / trainer / "metrics.jsonl")
        names[trainer] = {name for line in lines for name in line} - {"step"}
    return names


@pytest.mark.parametrize("trainer", ["ppo", "sft", "rm"])
def test_logged_metrics_are_documented(logged: dict[str, set[str]], trainer: str) -> None:
    for name in logged[trainer]:
        find(name, trainer)  # raises an error that names the metric


@pytest.mark.parametrize("trainer", ["ppo", "sft", "rm"])
def test_documented_metrics_are_logged(logged: dict[str, set[str]], trainer: str) -> None:
    table = [(metric, name) for metric in METRICS if metric.trainer == trainer for name in metric.names()]
    unlogged = [
        name
        for metric, name in table
        if not any(
            matches(name, logged_name) and find(logged_name, trainer) is metric for logged_name in logged[trainer]
        )
    ]
    unlogged = [name for name in unlogged if not name.startswith(OF_RANKS)]  # of runs with several ranks
    expected = OTHER_GENERATORS | EPISODES | {"timing/at"} if trainer == "ppo" else set[str]()
    assert {name for name in unlogged if not name.endswith(OTHER_MODELS)} == expected


def test_a_name_is_documented_once_for_a_trainer() -> None:
    names = [(metric.trainer, name) for metric in METRICS for name in metric.names()]
    assert len(names) == len(set(names))


def test_every_metric_is_computed_in_its_documented_module() -> None:
    assert [metric.name for metric in METRICS if not (HOME / metric.source).is_file()] == []
    for name in OTHER_GENERATORS:
        source = (HOME / find(name).source).read_text(encoding="utf-8")
        assert f'{name.removeprefix("rollout/")}"' in source, name


def test_names_used_elsewhere_are_in_the_table() -> None:
    headlines = {name for names in SCREEN.values() for name in names} - {"reward/mean"}  # of `camshaft generate`
    for name in {*RANK_REDUCTIONS, *headlines}:
        find(name)


def test_words_of_the_step_line_are_explained() -> None:
    reward = camshaft("metrics", "explain", "reward").out
    assert reward.startswith("'reward' on the line of a step is the first of these metrics that the run logs:")
    assert "critic/score/{mean,max,min}\n  Score of a response" in reward
    assert "Mean of log pi_old - log pi" in camshaft("metrics", "explain", "policy", "kl").out
    for word, names in SCREEN.items():
        assert any(name.split("/")[0] in explain(word) for name in names), word


def test_metrics_are_found_by_a_part_of_their_name() -> None:
    names = explain("kl").splitlines()
    assert {"  actor/ppo_kl", "  actor/kl_loss"} <= set(names)
    assert "  critic/score/{p10,p50,p90}" in explain("median")


def test_an_unknown_metric_suggests_the_nearest() -> None:
    run = camshaft("metrics", "explain", "val-core/openai/gsm8k/acc/maj@8/mean")
    assert (run.status, run.out.splitlines()[0]) == (0, "val-core/<source>/{reward,acc}/{best,maj}@<n>/mean")
    wrong = camshaft("metrics", "explain", "actor/ppo_lk")
    assert wrong.status == 2
    assert "Nearest: actor/ppo_kl" in wrong.err
    with pytest.raises(ConfigError):
        find("actor/pg_loss", "sft")
