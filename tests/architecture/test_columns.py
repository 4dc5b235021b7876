"""The columns that a real PPO step produces match the table: names, kinds and dtypes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_endpoint import CLIENT
from support.ppo_runs import run_ppo
from support.reward_models import make_tiny_reward_model

from camshaft.columns import COLUMNS
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.micro_batches import MicroBatches
from camshaft.models.tiny import make_tiny_model
from camshaft.roles.base import as_sequences
from camshaft.roles.episodes import EpisodePlayer
from camshaft.trainer import ppo

ROOT = Path(__file__).parents[2] / "camshaft"
TURNS = "actor_rollout_ref.rollout.multi_turn"
LOSS = "actor_rollout_ref.actor.policy_loss"
PAIRS = {"data/preferences", "trainer/supervised"}
"""Source of the columns for pairs of answers, which `tests/unit/trainer/test_rm.py` checks."""


def test_a_step_writes_exactly_the_columns_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[DataProto] = []
    original = ppo.batch_metrics
    monkeypatch.setattr(ppo, "batch_metrics", lambda batch: (batches.append(batch), original(batch))[1])
    of_engines: list[DataProto] = []
    prepare = MicroBatches.prepare

    def watched(micro_batches: MicroBatches, index: int) -> Any:
        def inputs(data: DataProto, ctx: Any) -> tuple[DataProto, Any]:
            data, ctx = hooks.preprocess(data, ctx) if hooks.preprocess is not None else (data, ctx)
            of_engines.append(data)
            return data, ctx

        hooks = micro_batches._hooks
        with monkeypatch.context() as patch:
            patch.setattr(micro_batches, "_hooks", hooks._replace(preprocess=inputs))
            return prepare(micro_batches, index)

    monkeypatch.setattr(MicroBatches, "prepare", watched)
    correction = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    overrides = {f"algorithm.rollout_correction.{key}": value for key, value in correction.items()}
    overrides |= {"reward_model.enable": True, "reward_model.model.path": make_tiny_reward_model(tmp_path / "rm")}
    overrides |= {"data.return_raw_chat": True, "data.return_raw_input_ids": True, "data.prompt_id_key": "data_source"}
    (tmp_path / "reward.py").write_text("def score(response, prompt): return len(response)")
    overrides |= {"custom_reward_function.path": tmp_path / "reward.py"}
    run_ppo(tmp_path, {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "full", **overrides}, steps=1)
    run_ppo(tmp_path, {"algorithm.adv_estimator": "remax"}, steps=1)
    experts = make_tiny_model(tmp_path / "experts", family="mixtral", num_local_experts=4)
    routed = {"actor_rollout_ref.model.path": experts, "actor_rollout_ref.actor.router_replay.mode": "R3"}
    estimator = {"algorithm.adv_estimator": "optimal_token_baseline", "actor_rollout_ref.rollout.n": 2}
    run_ppo(tmp_path, {**routed, **estimator, "data.train_batch_size": 4}, steps=1)
    bypass = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True}
    run_ppo(tmp_path, {f"algorithm.rollout_correction.{key}": value for key, value in bypass.items()}, steps=1)
    run_ppo(tmp_path, {f"{LOSS}.loss_mode": "kl_cov", f"{LOSS}.top_entropy_quantile": 0.5}, steps=1)
    episodes = {"custom_reward_function.path": "null", "data.max_prompt_length": 64}
    of_players: list[DataProto] = []
    play = EpisodePlayer.play
    monkeypatch.setattr(EpisodePlayer, "play", lambda self, *args: (of_players.append(args[1]), play(self, *args))[1])
    (tmp_path / "state.py").write_text("def score(environments): return [0.0]")
    game = {f"{TURNS}.environment": ROOT.parent / "examples/agents/hint.py"}
    run_ppo(tmp_path, {**episodes, **game, "custom_reward_function.path": tmp_path / "state.py"}, steps=1)
    (tmp_path / "agent.py").write_text(CLIENT + "def solve(base_url, api_key, prompt): return len(ask(prompt))")
    run_ppo(tmp_path, {**episodes, f"{TURNS}.agent": f"{tmp_path}/agent.py:solve"}, steps=1)
    of_third = batches[2].select("routed_experts", "routing_mismatch", "sum_pi_squared")
    others = batches[1].select("reward_baselines").union(of_third).union(batches[3].select("rollout_is_mean"))
    played = batches[-1].select("stop_reason", "turns", "env_scores", "env_failure", "transcript", "answer_options")
    others = others.union(of_players[0].select("environment_seed", "is_padding")).union(played)
    others = others.union(batches[-2].select("env_outcomes"))
    bypass = {"bypass_mode": True, "loss_type": "interpolated", "rollout_is": "token"}
    stale = {f"algorithm.rollout_correction.{key}": value for key, value in bypass.items()}
    stale["async_training.max_staleness"] = 1
    rows = batches[-1].select("sequence_lengths")
    run_ppo(tmp_path, stale, steps=1)
    batch = as_sequences(batches[0].union(others)).union(rows)
    batch = batch.union(batches[-1].select("policy_versions", "policy_ages"))
    selected = ("selected_tokens", "high_entropy")
    columns = batch.columns | next(micro.select("log_q").columns for micro in of_engines if "log_q" in micro)
    columns |= next(micro.select(*selected).columns for micro in of_engines if "high_entropy" in micro)
    columns |= of_engines[-1].select("sequence_weight").columns
    of_a_step = {name: column for name, column in COLUMNS.items() if not PAIRS & {column.written_by, *column.read_by}}
    assert set(columns) == set(of_a_step)
    for name, column in of_a_step.items():
        values: Any = columns[name]
        kind = "ragged" if isinstance(values, Ragged) else "tensor" if isinstance(values, torch.Tensor) else "object"
        assert kind == column.kind, name
        if kind != "object":
            dtype = values.values.dtype if isinstance(values, Ragged) else values.dtype
            assert str(dtype) == f"torch.{column.dtype}", name


def test_writers_and_readers_are_files_that_know_the_column() -> None:
    for name, column in COLUMNS.items():
        for place in (*column.written_by.split(" or "), *column.read_by):
            part = place.split(".")[0]
            path = ROOT / part if (ROOT / part).is_dir() else ROOT / f"{part}.py"
            assert path.exists(), f"{name}: there is no {part}"
