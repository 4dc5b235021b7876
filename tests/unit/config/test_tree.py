"""Dotted keys: access, changes, and the nearest match."""

import pytest

from camshaft.config import PPOConfig
from camshaft.config.schema.fields import describe
from camshaft.config.tree import (
    expand_keys,
    fields,
    flatten,
    format_value,
    has_key,
    keys_overlap,
    leaf_fields,
    nearest_keys,
    put,
    remove,
)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("trainer.sed", "trainer.seed"),
        ("data.trian_batch_size", "data.train_batch_size"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("rollout.temperature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.actor.kl_loss_coeff", "actor_rollout_ref.actor.kl_loss_coef"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("completely.different", None),
    ],
)
def test_nearest_key(typed, expected):
    suggestion = nearest_keys(typed, fields(PPOConfig))
    assert suggestion[:1] == ([expected] if expected else [])


def test_user_defined_mapping_is_a_leaf():
    tree = {"actor_rollout_ref": {"model": {"override_config": {"a": {"b": 1}}}}, "trainer": {}}
    assert flatten(tree, leaf_fields(PPOConfig)) == {
        "actor_rollout_ref.model.override_config": {"a": {"b": 1}},
        "trainer": {},
    }


def test_dotted_names_are_expanded_except_in_user_mappings():
    tree = {"a.b": 1, "a": {"c": 2, 3: 4}, "own": {"x.y": 5, 6: 7}}
    assert expand_keys(tree, ["own"]) == {"a": {"b": 1, "c": 2, "3": 4}, "own": {"x.y": 5, 6: 7}}


def test_put_creates_and_remove_deletes_empty_sections():
    tree: dict = {"a": 1}
    put(tree, "b.c.d", 2)
    assert tree == {"a": 1, "b": {"c": {"d": 2}}}
    remove(tree, "b.c.d")
    assert tree == {"a": 1}
    assert not has_key(tree, "a.b")
    assert not has_key(tree, "b")
    put(tree, ".a", 3)
    remove(tree, ".a")
    assert tree == {"a": 1}


def test_section_overlaps_its_keys():
    assert all(keys_overlap(*pair) for pair in [("a.b", "a"), ("a", "a.b"), ("a", "a")])
    assert not keys_overlap("a.bc", "a.b")


def test_values_are_formatted_as_on_the_command_line():
    assert [format_value(value) for value in (True, None, "text", " a", "", [1, "x"], 1e-6)] == [
        "true", "null", "text", '" a"', '""', '[1, "x"]', "1e-06",
    ]  # fmt: skip


def test_types_and_bounds_are_described():
    words = {key: describe(field) for key, field in leaf_fields(PPOConfig).items()}
    assert words["data.tokenizer"] == "a path, or null"
    assert words["data.shuffle"] == "true or false"
    assert words["trainer.total_training_steps"] == "an integer >= 1, or null"
    assert words["algorithm.gamma"] == "a number >= 0 and <= 1"
    assert words["trainer.resume_mode"] == "one of auto, disable, resume_path"
    assert words["actor_rollout_ref.model.override_config"] == "a mapping"
    assert (
        words["actor_rollout_ref.model.external_lib"]
        == "a module name, or a comma-separated list of module names, or null"
    )
    assert words["trainer.logger"] == "a list of names"
