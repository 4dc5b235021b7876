"""Short names set their keys on the command line, in files and in dicts."""

import re
from pathlib import Path

import pytest
import yaml

from camshaft.config import (
    EvalConfig,
    GenerateConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    compose,
    expand_short_names,
    from_container,
    load_ppo,
    load_sft,
)
from camshaft.config.foreign.answers import rows
from camshaft.config.foreign.rows import Renamed
from camshaft.config.schema.algorithm import ESTIMATORS
from camshaft.config.short_names import RECIPES, declared_short_names, short_names
from camshaft.config.tree import format_value, get, leaf_fields
from camshaft.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
SCHEMAS = [PPOConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig]


@pytest.fixture
def places(tmp_path, words):
    """Overrides of a CPU run without the keys that have short names."""
    kept = (
        "critic.",
        "data.val_files",
        "actor_rollout_ref.actor.strategy",
        "actor_rollout_ref.rollout.name",
        "trainer.",
    )
    return [word for word in words if word.startswith(kept)]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_short_names_are_unique_and_name_keys(schema):
    names = [entry.name for entry in declared_short_names(schema).values()]
    assert len(set(names)) == len(names)
    assert declared_short_names(schema).keys() <= leaf_fields(schema).keys()


def test_recipes_set_keys_and_estimators():
    for keys in RECIPES.values():
        assert set(keys) <= set(leaf_fields(PPOConfig))
        assert keys["algorithm.adv_estimator"] in ESTIMATORS
    assert not set(RECIPES) & set(ESTIMATORS)


def test_page_on_algorithms_lists_the_recipes():
    rows = re.findall(r"^\| `(\w+)` \| `(algorithm\.adv_estimator=.*)` \|$", PAGE, re.MULTILINE)
    page = {name: dict(word.split("=") for word in keys.split()) for name, keys in rows}
    assert page == {
        name: {key: format_value(value) for key, value in keys.items()}
        for name, keys in RECIPES.items()
        if len(keys) > 1
    }


def test_command_line_takes_short_names(places, tmp_path):
    files = [f"data={tmp_path}/train.parquet", f"model={tmp_path}/model", f"out={tmp_path}/a=b~c"]
    config = load_ppo([*places, *files, "algorithm=grpo", "n=4", "lr=2e-5", "steps=7", "batch=256", "data.seed=3"])
    assert config.data.train_files == (f"{tmp_path}/train.parquet",)
    assert (config.data.seed, config.data.train_batch_size) == (3, 256)
    assert config.actor_rollout_ref.model.path == f"{tmp_path}/model"
    assert config.algorithm.adv_estimator == "grpo"
    assert (config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor.optim.lr) == (4, 2e-5)
    assert config.trainer.total_training_steps == 7
    assert config.trainer.default_local_dir == f"{tmp_path}/a=b~c"


def test_supervised_commands_have_short_names(sft_words):
    words = [word for word in sft_words if not word.startswith("data.train_batch_size")]
    config = load_sft([*words, "lr=3e-4", "batch=8", "epochs=2", "max_length=64"])
    assert (config.optim.lr, config.data.train_batch_size) == (3e-4, 8)
    assert (config.trainer.total_epochs, config.data.max_length) == (2, 64)


@pytest.mark.parametrize(
    ("value", "path", "name"),
    [
        ("{}/score.py", "{}/score.py", "compute_score"),
        ("{}/score.py:exact", "{}/score.py", "exact"),
        ("'{}/score.py:exact'", "{}/score.py", "exact"),
        ("gsm8k", None, "gsm8k"),
        ("package.module:function", None, "package.module:function"),
    ],
)
def test_reward_is_a_file_or_a_function(words, tmp_path, value, path, name):
    (tmp_path / "score.py").write_text("def exact(response): return 1.0\n")
    custom = load_ppo([*words, "reward=" + value.format(tmp_path)]).custom_reward_function
    assert (custom.path, custom.name) == (path and path.format(tmp_path), name)


@pytest.mark.parametrize("place", ["command line", "dict"])
def test_reward_is_a_list_of_functions_with_weights(words, tmp_path, place):
    for name in ("format", "math"):
        (tmp_path / f"{name}.py").write_text("def score(response): return 1.0\n")
    functions, weights = [f"{tmp_path}/format.py", f"{tmp_path}/math.py:score", "gsm8k"], [0.2, 1, -1.0]
    if place == "dict":
        tree = dict(word.split("=", 1) for word in words if "custom_reward" not in word)
        tree = {key: yaml.safe_load(value) for key, value in tree.items()}
        config = from_container({**tree, "reward": functions, "reward_weights": weights}, PPOConfig)
    else:
        config = load_ppo([*words, f"reward=[{','.join(functions)}]", "reward_weights=[0.2,1,-1.0]"])
    selected = config.custom_reward_function.selected()
    assert [(one.label, one.path, one.name, one.weight) for one in selected] == [
        ("format", functions[0], "compute_score", 0.2),
        ("score", f"{tmp_path}/math.py", "score", 1.0),
        ("gsm8k", None, "gsm8k", -1.0),
    ]


def test_prefixes_of_hydra_are_kept(words):
    assert load_ppo([*words, "++seed=9"]).trainer.seed == 9
    assert load_ppo([*words, "trainer.seed=9", "~seed"]).trainer.seed == 1


def test_sweep_over_short_names(words, tmp_path):
    argv = ["-m", "lr=1e-5,1e-4", "algorithm=gae,dr_grpo", "n=8"]
    argv += ["trainer.experiment_name=${algorithm.adv_estimator}_${actor_rollout_ref.actor.optim.lr}"]
    configs = compose([*words, *argv], PPOConfig)
    assert [config.actor_rollout_ref.actor.optim.lr for config in configs] == [1e-5, 1e-5, 1e-4, 1e-4]
    assert [config.algorithm.norm_adv_by_std_in_grpo for config in configs] == [True, False, True, False]


def test_sweep_over_reward_files(words, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("def score(response): return 1.0\n")
    configs = compose([*words, "-m", f"reward={tmp_path}/one.py,{tmp_path}/two.py"], PPOConfig)
    assert [config.custom_reward_function.path for config in configs] == [f"{tmp_path}/one.py", f"{tmp_path}/two.py"]


def test_files_take_short_names(words, tmp_path):
    (tmp_path / "other.jsonl").touch()
    (tmp_path / "mine.yaml").write_text(f"lr: 3.0e-5\ndata: {tmp_path}/other.jsonl\nalgorithm: rloo\n")
    kept = [word for word in words if not word.startswith("data.train_files")]
    config = load_ppo(
        [*kept, "n=2", "data.seed=5", "algorithm.gamma=0.9"], config_dir=str(tmp_path), config_name="mine"
    )
    assert config.data.train_files == (f"{tmp_path}/other.jsonl",)
    assert (config.data.seed, config.algorithm.adv_estimator, config.algorithm.gamma) == (5, "rloo", 0.9)
    assert config.actor_rollout_ref.actor.optim.lr == 3e-5
    argv = [*kept, "n=2", "data.seed=5", "--config-dir", str(tmp_path), "--config-name", "mine"]
    assert compose(argv, PPOConfig)[0].data.train_files == (f"{tmp_path}/other.jsonl",)


def test_override_of_a_key_wins_over_a_short_name_in_a_file(words, tmp_path):
    (tmp_path / "mine.yaml").write_text("lr: 3.0e-5\n")
    words = [*words, "actor_rollout_ref.actor.optim.lr=1e-4"]
    config = load_ppo(words, config_dir=str(tmp_path), config_name="mine")
    assert config.actor_rollout_ref.actor.optim.lr == 1e-4


def test_section_under_a_short_name_stays_a_section(words, tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {seed: 4}\n")
    config = load_ppo(words, config_dir=str(tmp_path), config_name="mine")
    assert config.data.seed == 4
    assert expand_short_names({"data": {"seed": 1}, "lr": 2.0}, PPOConfig) == {
        "data": {"seed": 1},
        "actor_rollout_ref.actor.optim.lr": 2.0,
    }


def test_config_group_takes_precedence_over_a_short_name(words, tmp_path):
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "small.yaml").write_text("# @package _global_\ntrainer: {seed: 77}\n")
    assert load_ppo([*words, "+device=small"], config_dir=str(tmp_path)).trainer.seed == 77


def _load_files(words, folder, name="top", **files):
    """Write config files, and load `name` with `load_ppo` and with `compose`, which must agree."""
    for stem, text in files.items():
        (folder / f"{stem}.yaml").write_text(text)
    words = [*words, "trainer.experiment_name=x"]
    config = load_ppo(words, config_dir=str(folder), config_name=name)
    (composed,) = compose([*words, "--config-dir", str(folder), "--config-name", name], PPOConfig)
    assert composed.model_dump() == config.model_dump()
    return config


BASE = "defaults: [ppo_trainer, _self_]\n"
TOP = "defaults: [base, _self_]\n"


@pytest.mark.parametrize("place", ["override", "file", "group"])
def test_recipe_of_an_included_file_survives_other_keys_of_its_section(words, tmp_path, place):
    base, words = BASE + "algorithm: dapo\n", list(words)
    if place == "override":
        config = _load_files([*words, "algorithm.gamma=0.9"], tmp_path, base=base, top=TOP)
    elif place == "file":
        config = _load_files(words, tmp_path, base=base, top=TOP + "algorithm: {gamma: 0.9}\n")
    else:
        (tmp_path / "exp").mkdir()
        (tmp_path / "exp" / "one.yaml").write_text("# @package _global_\nalgorithm: dapo\n")
        top = "defaults: [ppo_trainer, exp: one, _self_]\nalgorithm: {gamma: 0.9}\n"
        config = _load_files(words, tmp_path, top=top)
    assert (config.algorithm.adv_estimator, config.algorithm.gamma) == ("grpo", 0.9)
    assert config.algorithm.filter_groups.enable
    assert config.actor_rollout_ref.rollout.n == 16


def test_keys_that_an_included_file_sets_win_over_a_recipe(words, tmp_path):
    base = BASE + "algorithm: dr_grpo\nactor_rollout_ref: {actor: {loss_agg_mode: token-mean}}\n"
    actor = _load_files(words, tmp_path, base=base, top=TOP).actor_rollout_ref.actor
    assert actor.loss_agg_mode == "token-mean"


def test_the_last_file_wins_with_short_names_and_keys(words, tmp_path):
    base = BASE + "lr: 1.0e-4\nn: 4\nsteps: 7\nactor_rollout_ref: {actor: {clip_ratio: 0.3}}\n"
    top = TOP + "actor_rollout_ref: {actor: {optim: {lr: 1.0e-6}}, rollout: {n: auto}}\ntrainer.seed: 4\nseed: 4\n"
    config = _load_files([*words, "algorithm=gae"], tmp_path, base=base, top=top)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.actor_rollout_ref.actor.clip_ratio == 0.3
    assert (config.actor_rollout_ref.rollout.n, config.trainer.total_training_steps) == (1, 7)
    assert config.trainer.seed == 4


def test_a_contradiction_in_one_file_is_an_error_even_with_the_default(words, tmp_path):
    (tmp_path / "top.yaml").write_text("lr: 1.0e-4\nactor_rollout_ref: {actor: {optim: {lr: 1.0e-6}}}\n")
    with pytest.raises(ConfigError, match=r"lr = 0\.0001\n.*which is set to 1e-06"):
        load_ppo(words, config_dir=str(tmp_path), config_name="top")


def test_a_later_reward_replaces_an_earlier_one(words, tmp_path):
    kept = [word for word in words if not word.startswith("custom_reward_function")]
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("def score(response): return 1.0\n")
    one, two = f"{tmp_path}/one.py", f"{tmp_path}/two.py"
    base = BASE + f"reward: {one}:score\n"
    for words in ([*kept, f"reward={two}"], [*kept, "reward=gsm8k", f"reward={two}"]):
        custom = _load_files(words, tmp_path, base=base, top=TOP).custom_reward_function
        assert (custom.path, custom.name) == (two, "compute_score")
    custom = _load_files(kept, tmp_path, base=base, top=TOP + f"reward: [gsm8k, {two}]\n").custom_reward_function
    assert [one.path for one in custom.selected()] == [None, two]
    custom = _load_files([*kept, f"reward=[gsm8k,{two}]"], tmp_path, base=base, top=TOP).custom_reward_function
    assert [one.path for one in custom.selected()] == [None, two]
    functions = BASE + f"reward: [gsm8k, {two}]\n"
    custom = _load_files([*kept, "reward=null"], tmp_path, base=functions, top=TOP).custom_reward_function
    assert (custom.path, custom.name, custom.functions) == (None, None, ())
    custom = _load_files([*kept, "reward=gsm8k"], tmp_path, base=base, top=TOP).custom_reward_function
    assert (custom.path, custom.name) == (None, "gsm8k")


def test_files_with_the_name_of_a_default_and_on_the_search_path_are_read(words, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.yaml").write_text(BASE + "lr: 1.0e-4\n")
    place = f"hydra.searchpath=[file://{tmp_path}/shared]"
    argv = [*words, place, "trainer.experiment_name=x", "--config-dir", str(tmp_path), "--config-name", "top"]
    (tmp_path / "top.yaml").write_text(TOP + "algorithm: rloo\n")
    config = compose(argv, PPOConfig)[0]
    assert (config.actor_rollout_ref.actor.optim.lr, config.algorithm.adv_estimator) == (1e-4, "rloo")
    (tmp_path / "ppo_trainer.yaml").write_text("lr: 1.0e-4\n")
    assert load_ppo(words, config_dir=str(tmp_path)).actor_rollout_ref.actor.optim.lr == 1e-4


def test_the_printed_config_contains_the_keys_of_files(words, tmp_path, capsys):
    (tmp_path / "base.yaml").write_text(BASE + "algorithm: rloo\nlr: 1.0e-4\nn: 3\n")
    (tmp_path / "top.yaml").write_text(TOP + "n: 2\n")
    argv = [*words, "--config-dir", str(tmp_path), "--config-name", "top", "algorithm.gamma=0.9", "lr=1e-3"]
    assert compose([*argv, "--cfg", "job"], PPOConfig) == []
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["algorithm"]["adv_estimator"], printed["algorithm"]["gamma"]) == ("rloo", 0.9)
    assert printed["actor_rollout_ref"]["rollout"]["n"] == 2
    assert printed["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-3


def test_a_deleted_key_or_short_name_has_its_default(words, tmp_path):
    base = BASE + "lr: 1.0e-4\ntrainer: {seed: 9}\n"
    config = _load_files([*words, "~lr", "~trainer.seed"], tmp_path, base=base, top=TOP)
    assert (config.actor_rollout_ref.actor.optim.lr, config.trainer.seed) == (1e-6, 1)


def test_a_section_as_the_value_of_an_override_is_merged_with_a_short_name(words):
    config = load_ppo([*words, "algorithm={gamma: 0.5}", "algorithm.adv_estimator=dapo"])
    assert (config.algorithm.gamma, config.algorithm.adv_estimator) == (0.5, "grpo")


def test_dict_takes_short_names(words, tmp_path):
    values: dict[str, object] = {
        key: int(value) if value.isdigit() else value for key, value in (w.split("=", 1) for w in words)
    }
    values |= {"seed": 5, "algorithm": "ppo"}
    config = from_container(values, PPOConfig)
    assert (config.trainer.seed, config.algorithm.adv_estimator) == (5, "gae")


@pytest.mark.parametrize("other", ["actor_rollout_ref.model.path=b", "+actor_rollout_ref.model.path='b'"])
def test_contradiction_names_both_keys(words, other):
    kept = [word for word in words if not word.startswith("actor_rollout_ref.model.path")]
    with pytest.raises(ConfigError, match=r"model = a\n.*actor_rollout_ref\.model\.path, which is set to b"):
        load_ppo([*kept, "model=a", other])
    with pytest.raises(ConfigError, match=r"model = a\n.*actor_rollout_ref\.model\.path, which is set to b"):
        expand_short_names({"model": "a", "actor_rollout_ref": {"model.path": "b"}}, PPOConfig)


def test_equal_values_are_no_contradiction(words, tmp_path):
    assert load_ppo([*words, "seed=3", "trainer.seed=3"]).trainer.seed == 3


def test_recipe_sets_the_keys_of_an_algorithm(words):
    config = load_ppo([*words, "algorithm=dapo"])
    actor = config.actor_rollout_ref.actor
    assert config.algorithm.adv_estimator == "grpo"
    assert (actor.clip_range(), config.actor_rollout_ref.rollout.n) == ((0.2, 0.28), 16)
    assert config.algorithm.filter_groups.enable


def test_an_unknown_algorithm_is_answered_with_the_nearest_name(words):
    with pytest.raises(ConfigError, match=r"one of cispo, dapo, .* Did you mean dapo\?"):
        load_ppo([*words, "algorithm=dapoo"])


def test_keys_of_the_user_win_over_a_recipe(words):
    config = load_ppo([*words, "algorithm=dapo", "n=4", "actor_rollout_ref.actor.clip_ratio_high=0.4"])
    assert config.actor_rollout_ref.actor.clip_range() == (0.2, 0.4)
    assert config.actor_rollout_ref.rollout.n == 4


def test_values_of_sections_and_files_win_over_a_recipe_even_if_they_are_defaults(words, tmp_path):
    off = "algorithm.filter_groups={enable: false}"
    assert load_ppo([*words, "algorithm=dapo", off]).algorithm.filter_groups.enable is False
    (tmp_path / "mine.yaml").write_text("algorithm: {adv_estimator: dapo, filter_groups: {enable: false}}\n")
    config = load_ppo(words, config_dir=str(tmp_path), config_name="mine")
    assert config.algorithm.filter_groups.enable is False
    assert config.actor_rollout_ref.rollout.n == 16
    argv = [*words, "--config-dir", str(tmp_path), "--config-name", "mine"]
    assert compose(argv, PPOConfig)[0].algorithm.filter_groups.enable is False


@pytest.mark.parametrize("name", [*RECIPES, *ESTIMATORS])
def test_every_algorithm_name_is_valid(words, name):
    config = load_ppo([*words, f"algorithm={name}", "n=8", "algorithm.gdpo_reward_keys=score"])
    expected = RECIPES.get(name, {}) | {"actor_rollout_ref.rollout.n": 8}
    assert {key: get(config.model_dump(), key) for key in expected} == expected


def test_help_lists_the_short_names(capsys):
    from camshaft.cli import main

    for command, schema in (("ppo", PPOConfig), ("sft", SFTConfig), ("rm", RMConfig), ("generate", GenerateConfig)):
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(f"  {entry.name}=" in text and key in text for key, entry in declared_short_names(schema).items())
        assert max(map(len, text.splitlines())) <= 120


def test_explain_describes_a_short_name(capsys):
    from camshaft.cli import main

    assert main(["config", "explain", "lr"]) == 0
    assert "actor_rollout_ref.actor.optim.lr" in capsys.readouterr().out
    assert main(["config", "explain", "data"]) == 0
    assert "short for data.train_files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("num_generations=8", r"n \(short for actor_rollout_ref\.rollout\.n\)"),
        ("num_generation=8", r"n \(short for actor_rollout_ref\.rollout\.n\)"),
        ("per_device_train_batch_size=8", r"actor_rollout_ref\.actor\.ppo_micro_batch_size_per_gpu"),
        ("max_completion_length=64", "response_length"),
        ("beta=0.04", r"actor_rollout_ref\.actor\.kl_loss_coef"),
        ("learning_rate=1e-5", "lr"),
        ("modle=x", "model"),
    ],
)
def test_names_of_other_libraries_are_answered_with_the_key(words, word, name):
    with pytest.raises(ConfigError, match=rf"unknown key\. Did you mean {name}"):
        load_ppo([*words, word])


@pytest.mark.parametrize("option", ["--pretrain", "--init_kl_coef=0.01", "--rollout-batch-size"])
def test_options_of_other_libraries_are_answered_with_the_key(words, option):
    with pytest.raises(ConfigError, match=r"is not an option\. Write key=value with the key (model|algorithm|batch)"):
        compose([*words, option, "x=1"], PPOConfig)


def test_an_unknown_option_is_an_error(words):
    with pytest.raises(ConfigError, match=r"'--foo' is not an option\. Write key=value, for example trainer\.seed=7"):
        compose([*words, "--foo"], PPOConfig)


def test_supervised_commands_answer_with_their_keys(sft_words):
    with pytest.raises(ConfigError, match=r"Did you mean data\.micro_batch_size_per_gpu\?"):
        load_sft([*sft_words, "per_device_train_batch_size=8"])


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig, RMConfig])
def test_names_of_other_libraries_lead_to_keys(schema):
    names = {name: row.key for name, (_, row) in rows(schema).items() if isinstance(row, Renamed)}
    keys = {key: short_names(schema).get(key, key) for key in names.values()}
    known = {name for name in names if keys[names[name]] in leaf_fields(schema)}
    assert len(known) > (70 if schema is PPOConfig else 25)
    assert not set(names) & set(short_names(schema))
    if schema is PPOConfig:
        assert {names[name] for name in set(names) - known} == {"max_length"}  # of supervised runs
