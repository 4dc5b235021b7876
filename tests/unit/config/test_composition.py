"""Config files and overrides are composed as by Hydra."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from camshaft.config import PPOConfig
from camshaft.config.composition import compose_jobs
from camshaft.config.defaults import raw_defaults
from camshaft.config.tree import merge
from camshaft.errors import ConfigError

Files = Mapping[str, str]


@pytest.fixture
def composed(tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """Return a function that writes files and composes `top` with camshaft and with Hydra."""

    def compose(files: Files, overrides: list[str]) -> tuple[Any, Any]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"{name}.yaml").write_text(text)
        (job,) = compose_jobs(PPOConfig, overrides, [tmp_path], "top" if files else None)
        ConfigStore.instance().store("ppo_trainer", raw_defaults(PPOConfig))
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
            groups = [word for word in overrides if (tmp_path / word.partition("=")[0].partition("@")[0]).is_dir()]
            typed = [word if word in groups or word[0] in "+~" else f"++{word}" for word in overrides]
            by_hydra = OmegaConf.to_container(hydra.compose("top" if files else "ppo_trainer", typed), resolve=False)
        return merge(raw_defaults(PPOConfig), job.tree), merge(raw_defaults(PPOConfig), by_hydra)

    return compose


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.seed=7", "trainer.seed=8"],
        ["actor_rollout_ref.actor.optim.lr=1e-5", "algorithm.gamma=.5", "trainer.total_epochs=0x10"],
        ["trainer.logger=[console,'a b',\"c,d\"]", "trainer.experiment_name='1e5'", "trainer.project_name=1_000"],
        ["trainer.experiment_name=null", "data.shuffle=yes", "trainer.project_name=''", "critic.optim.lr=nan"],
        ["actor_rollout_ref.actor.fsdp_config={fsdp_size: 2, wrap_policy: {min_num_params: 4}}"],
        ["actor_rollout_ref.actor.fsdp_config.fsdp_size=3", "++actor_rollout_ref.actor.engine_kwargs.a.b=[1,{c: d}]"],
        ["trainer.experiment_name=x\\,y", "trainer.project_name=path/to:some@where"],
        ["reward_model.reward_kwargs={a: 1}", "reward_model.reward_kwargs.b=2", "trainer.project_name=int(3.6)"],
        ["+trainer.new=1", "trainer.new=2", "~trainer.new", "++trainer.new=${trainer.seed}"],
        ["custom_reward_function.reward_kwargs={a: {b: 1}}", "+custom_reward_function.reward_kwargs.a={c: 2}"],
        ["trainer.logger=sort([b,a])", "trainer.resource_pools={a: {nnodes: 1}}", "~trainer.resource_pools.a"],
    ],
    ids=lambda overrides: " ".join(overrides)[:40] or "none",
)
def test_overrides_are_applied_as_by_hydra(composed: Callable[..., Any], overrides: list[str]) -> None:
    own, by_hydra = composed({}, overrides)
    assert str(own) == str(merge(own, by_hydra))
    assert own.keys() == by_hydra.keys()


BASE = "defaults: [ppo_trainer, _self_]\n"


@pytest.mark.filterwarnings("ignore:.*missing `_self_`")
@pytest.mark.parametrize(
    ("files", "overrides"),
    [
        ({"top": BASE + "trainer: {seed: 3}\n"}, []),
        ({"top": "defaults: [ppo_trainer, base]\ntrainer: {seed: 3}\n", "base": "trainer: {seed: 4, nnodes: 2}\n"}, []),
        ({"top": "defaults: [ppo_trainer, _self_, base]\ntrainer: {seed: 3}\n", "base": "trainer: {seed: 4}\n"}, []),
        ({"top": "defaults: [base, _self_]\n", "base": BASE + "trainer: {seed: 4}\n"}, ["trainer.seed=5"]),
        ({"top": "defaults: [ppo_trainer, trainer: a, _self_]\n", "trainer/a": "seed: 4\n"}, []),
        ({"top": "defaults: [ppo_trainer, trainer: a]\n", "trainer/a": "seed: 4\n", "trainer/b": "seed: 5\n"},
         ["trainer=b"]),
        ({"top": "defaults: [ppo_trainer, trainer: a]\n", "trainer/a": "seed: 4\n"}, ["~trainer"]),
        ({"top": "defaults: [ppo_trainer, trainer: a]\n", "trainer/a": "seed: 4\n"}, ["~trainer=a", "data.seed=3"]),
        ({"top": "defaults: [ppo_trainer, trainer: null]\n", "trainer/a": "seed: 4\n"}, ["trainer=a"]),
        ({"top": "defaults: [ppo_trainer, trainer: [a, b]]\n", "trainer/a": "seed: 4\n", "trainer/b": "nnodes: 5\n"},
         []),
        ({"top": BASE, "exp/a": "# @package _global_\ntrainer: {seed: 8}\n"}, ["+exp=a"]),
        ({"top": BASE, "exp/a": "\n# @package trainer\n# text\nseed: 8\n"}, ["+exp=a"]),
        ({"top": BASE, "exp/a": "seed: 8\n"}, ["+exp@trainer=a"]),
        ({"top": "defaults: [ppo_trainer, exp@trainer: a]\n", "exp/a": "seed: 8\n", "exp/b": "seed: 9\n"},
         ["exp@trainer=b"]),
        ({"top": "defaults: [ppo_trainer, optional exp: none, optional missing: x]\n", "exp/a": "seed: 8\n"}, []),
        ({"top": "defaults: [ppo_trainer, exp: a]\n", "exp/a": "# @package _global_\ndefaults: [b, _self_]\n",
          "exp/b": "# @package _global_\ntrainer: {seed: 2}\n"}, []),
        ({"top": "defaults: [ppo_trainer, exp: a]\n", "exp/a": "# @package _global_\ndefaults: [/shared]\n",
          "shared": "trainer: {seed: 2}\n"}, []),
        ({"top": "defaults: [ppo_trainer, trainer: a, exp: e, _self_]\n", "trainer/a": "seed: 4\n",
          "trainer/b": "seed: 5\n", "exp/e": "# @package _global_\ndefaults: [override /trainer: b]\n"}, []),
        ({"top": "defaults: [ppo_trainer, trainer: a, override trainer: b]\n", "trainer/a": "seed: 4\n",
          "trainer/b": "seed: 5\n"}, []),
        ({"top": "defaults: [ppo_trainer, size: s, trainer: '${size}_x']\n", "size/s": "# @package _global_\n",
          "trainer/s_x": "seed: 6\n"}, []),
        ({"top": "defaults: [ppo_trainer, a/b/c]\n", "a/b/c": "seed: 6\n"}, []),
        ({"top": "defaults: [ppo_trainer, trainer/sub@_here_: c]\n", "trainer/sub/c": "trainer: {seed: 6}\n"}, []),
        ({"top": "defaults: [ppo_trainer, x: a]\n", "x/a": "defaults: [y: b]\nk: 1\n", "x/y/b": "z: 2\n"}, []),
        ({"top": "defaults: [ppo_trainer, x: a]\n", "x/a": "defaults: [y@_global_.trainer: b]\nk: 1\n",
          "x/y/b": "seed: 2\n"}, []),
        ({"top": BASE + "actor_rollout_ref: {model: {override_config: {a: 1, b: {c: 2}}}}\n"},
         ["actor_rollout_ref.model.override_config={b: {d: 3}}"]),
    ],
)  # fmt: skip
def test_files_are_merged_as_by_hydra(composed: Callable[..., Any], files: Files, overrides: list[str]) -> None:
    own, by_hydra = composed(files, overrides)
    assert own == by_hydra


def test_a_sweep_visits_all_options_of_a_group(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    for name, seed in (("one", 1), ("two", 2), ("three", 3)):
        (tmp_path / "exp" / f"{name}.yaml").write_text(f"# @package _global_\ntrainer: {{seed: {seed}}}\n")
    jobs = compose_jobs(PPOConfig, ["+exp=glob(t*)", "data.seed=range(1,3)"], [tmp_path], sweep=True)
    assert [(job.tree["trainer"]["seed"], job.tree["data"]["seed"]) for job in jobs] == [(3, 1), (3, 2), (2, 1), (2, 2)]
    jobs = compose_jobs(PPOConfig, ["+exp=one,two", "data.seed=choice(7,8)"], [tmp_path], sweep=True)
    assert [job.overrides for job in jobs] == [
        [f"+exp={name}", f"data.seed={seed}"] for name in ("one", "two") for seed in (7, 8)
    ]


@pytest.mark.parametrize(
    ("files", "overrides", "message"),
    [
        ({"top": "defaults: [base]\n", "base": "defaults: [top]\n"}, [], "top.yaml is in its own defaults list"),
        ({"top": "defaults: [trainer: b]\n", "trainer/a": ""}, [], "no config file trainer/b.yaml.* files there: a"),
        ({"top": "", "trainer/a": ""}, ["trainer=a"], r"No match in the defaults list\. .*, write \+trainer=NAME"),
        ({"top": "defaults: [trainer: '???']\n", "trainer/a": ""}, [], "must specify 'trainer'.*\n.*\n\ta"),
        ({"top": "defaults: {a: 1}\n"}, [], "top.yaml: defaults must be a list"),
        ({"top": "defaults: [{a: 1, b: 2}]\n"}, [], "top.yaml: the entry .* must be NAME or GROUP: NAME"),
        ({"top": "- 1\n"}, [], "top.yaml: must contain keys with values"),
        ({"top": ""}, ["trainer.seed=1,2"], "several values in trainer.seed=1,2\n.*add -m"),
        ({"top": ""}, ["~trainer.sed"], r"Could not delete from config\. 'trainer\.sed' does not exist"),
        ({"top": ""}, ["~trainer.seed=3"], "The value of 'trainer.seed' is 1 and not 3"),
    ],
)  # fmt: skip
def test_an_error_names_the_file_or_the_override(
    tmp_path: Path, files: Files, overrides: list[str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose_jobs(PPOConfig, overrides, [tmp_path], "top")
