"""A custom estimator and loss from the page on algorithms, in a run, and the recipes of that page."""

import re
import statistics
import sys
from pathlib import Path

import pytest
from support.command_line import camshaft
from support.pages import commands, run_here, script
from support.ppo_runs import ppo_args, run_ppo

from camshaft.algorithms import AGGREGATIONS, ESTIMATORS, KL_PENALTIES, POLICY_LOSSES
from camshaft.config import load_ppo
from camshaft.dataproto import DataProto
from camshaft.errors import ConfigError
from camshaft.tracking.run_folder import RunFolder
from camshaft.trainer import ppo

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
OWN = {
    "algorithm.adv_estimator": "my_algorithms:above_median",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "my_algorithms:without_a_clip",
    "actor_rollout_ref.rollout.n": 3,
}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(# my_algorithms.py\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_algorithms.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_algorithms", raising=False)


@pytest.mark.usefixtures("example")
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in OWN.items():
        assert isinstance(value, int) or f"{key}={value}" in PAGE
    batches: list[DataProto] = []
    original = ppo.batch_metrics
    monkeypatch.setattr(ppo, "batch_metrics", lambda batch: (batches.append(batch), original(batch))[1])
    (step,) = run_ppo(tmp_path, {**OWN, "critic.enable": True}, steps=1)
    assert step.metrics["actor/ratio_mean"] == pytest.approx(1, abs=0.1)
    assert "actor/pg_clipfrac" not in step.metrics
    assert step.metrics["critic/vf_loss"] > 0  # the config requires a critic
    (batch,) = batches
    scores = batch["token_level_scores"].sum().tolist()
    expected = [
        score - statistics.median(scores[row // 3 * 3 : row // 3 * 3 + 3])
        for row, score in enumerate(scores)
        for _ in range(int(batch["responses"].lengths[row]))
    ]
    assert batch["advantages"].values.tolist() == pytest.approx(expected)


@pytest.mark.usefixtures("example")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("seed", "steps"), [(1, 25), *(pytest.param(seed, 40, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_the_example_learns_the_task_of_the_tutorial(
    seed: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example replaces GRPO in the command of the tutorial, and no other key is set."""
    monkeypatch.chdir(tmp_path)
    setup, (_, *words) = _tutorial(tmp_path)
    run_here(setup, monkeypatch)
    (keys,) = re.findall(r"```text\n(algorithm.adv_estimator=my_algorithms.*?)```", PAGE, re.DOTALL)
    words.remove("algorithm=grpo")
    words[words.index("steps=40")] = f"steps={steps}"
    run = camshaft(*words, *keys.split(), f"seed={seed}")
    assert run.status == 0, run.err
    assert re.search(r"n=8 +responses per prompt, which my_algorithms:above_median may compare\n", run.out)
    folder = RunFolder("runs/digits")
    folder.metrics.poll()
    best = max(folder.metrics.series("critic/score/mean")[1])
    assert best >= 0.9, f"the highest mean reward is {best:.3f}"
    assert all(folder.metrics.series("actor/signal_share")[1])


def _tutorial(folder: Path) -> tuple[list[list[str]], list[str]]:
    """Return the commands of the tutorial that prepare the run, and the command of the run."""
    typed = commands(folder, script(folder, "docs/tutorials/own-task.md"))
    (position,) = [at for at, words in enumerate(typed) if words[:2] == ["camshaft", "ppo"]]
    return typed[:position], typed[position]


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("key", list(OWN)[:2])
def test_a_missing_folder_is_an_error_before_loading(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="module my_algorithms has no attribute 'nothing'"):
        run_ppo(tmp_path, {**OWN, key: "my_algorithms:nothing"}, steps=1)


def test_the_page_names_every_component() -> None:
    for name in (*ESTIMATORS, *POLICY_LOSSES, *KL_PENALTIES):
        assert f"| `{name}` |" in PAGE, name
    for name in AGGREGATIONS:
        assert f"`{name}`" in PAGE, name


RECIPES = dict(re.findall(r"^\| ([A-Z][\w.+]*) \| .*?(`.*`).*? \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_config_that_loads(name: str, tmp_path: Path) -> None:
    typed = [word for words in re.findall(r"`([^`]*)`", RECIPES[name]) for word in words.split() if "=" in word]
    assert typed
    typed += [] if any(word.startswith("n=") for word in typed) else ["n=8"]
    kept = [
        word for word in ppo_args(tmp_path) if not word.startswith(("algorithm.adv", "actor_rollout_ref.rollout.n="))
    ]
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
    positions = [
        f"{role}.model.override_config.max_position_embeddings=8192" for role in ("actor_rollout_ref", "critic")
    ]
    lengths = ["data.max_response_length=4096", *(f"+{word}" for word in positions)]
    load_ppo([*kept, "data.train_batch_size=8", mini, *lengths, *typed])


def test_the_recipes_are_found() -> None:
    assert set(RECIPES) == {"GRPO", "RLOO", "REINFORCE++", "ReMax", "OPO", "GPG", "DAPO"}
