"""Descriptions of keys and sections, the file of defaults, and the reference page."""

import re

import pytest
from omegaconf import OmegaConf

from camshaft.config import EvalConfig, GenerateConfig, PPOConfig, RMConfig, SFTConfig, explain, reference_page, show
from camshaft.config.defaults import raw_defaults
from camshaft.config.render import SCHEMAS
from camshaft.config.short_names import declared_short_names
from camshaft.config.tree import fields, leaf_fields
from camshaft.errors import ConfigError


def test_explain_shows_description_type_and_default():
    text = explain("actor_rollout_ref.actor.ppo_mini_batch_size")
    assert text.startswith("actor_rollout_ref.actor.ppo_mini_batch_size\n  Number of prompts per optimizer step")
    assert "type        auto, or an integer >= 1" in text
    assert "default     auto" in text
    assert "summed over all ranks. Each prompt contributes rollout.n sequences." in text


def test_explain_resolves_a_default_that_refers_to_another_key():
    text = explain("actor_rollout_ref.rollout.response_length")
    assert "default     ${data.max_response_length}" in text
    assert "resolved    512" in text


def test_explain_lists_the_keys_of_a_section():
    text = explain("algorithm.kl_ctrl")
    assert {"type", "kl_coef", "horizon", "target_kl"} < set(text.split())


def test_explain_resolves_an_alias():
    text = explain("algorithm.gemma")
    assert text.startswith("algorithm.gemma is an alias of:")
    assert "Discount factor per token." in text


def test_explain_notes_unimplemented_values():
    assert "not implemented" not in explain("trainer.seed")
    assert "some values are not implemented" in explain("actor_rollout_ref.rollout.multi_turn.history")


def test_an_unknown_key_is_reported_with_the_nearest_keys():
    with pytest.raises(ConfigError, match=r"Nearest: .*algorithm\.kl_ctrl\.kl_coef"):
        explain("algorithm.kl_ctrl.kl_coeff")
    with pytest.raises(ConfigError, match=r"is a key of `camshaft sft`"):
        explain("data.response_key")
    with pytest.raises(ConfigError, match=r"Sections: data, actor_rollout_ref"):
        explain("xyzzy")


def test_a_text_is_searched_in_the_descriptions():
    lines = explain("learning rate").splitlines()
    assert re.fullmatch(r"no key is called 'learning rate'; \d+ keys or their descriptions contain it:", lines[0])
    assert lines[1:3] == [
        "  actor_rollout_ref.actor.optim.lr (lr=)",
        "      Peak learning rate, reached at the end of the warm-up",
    ]
    assert explain("number of").splitlines()[-1].endswith("more; add a word to narrow the search")
    assert "  algorithm.kl_ctrl.kl_coef" in explain("kl").splitlines()
    assert "  optim.lr (lr=)" in explain("Learning RATE", "sft").splitlines()


@pytest.mark.parametrize(
    ("trainer", "schema"),
    [("ppo", PPOConfig), ("sft", SFTConfig), ("rm", RMConfig), ("generate", GenerateConfig), ("eval", EvalConfig)],
)
def test_every_key_can_be_explained(trainer, schema):
    assert all(explain(key, trainer).startswith(key) for key in fields(schema))


@pytest.mark.parametrize(("trainer", "schema"), SCHEMAS.items())
def test_show_returns_the_defaults_as_yaml(trainer, schema):
    shown = OmegaConf.to_container(OmegaConf.create(show(trainer)), resolve=False)
    assert shown == raw_defaults(schema)


def test_show_describes_each_key_in_a_comment():
    assert "train_batch_size: auto # Number of prompts per training iteration, summed over all ranks" in show()
    assert "max_length: 1024" in show("sft")


def test_the_reference_page_has_a_line_for_every_key():
    lines = reference_page().splitlines()
    rows = [line for line in lines if line.startswith("| `") and line.count(" | ") == 3]
    schemas = (PPOConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig)
    assert len(rows) == sum(len(leaf_fields(schema)) for schema in schemas)
    assert any(row.startswith("| `data.val_batch_size` | `1312` | an integer >= 1 |") for row in rows)
    short_rows = [line for line in lines if line.startswith("| `") and line.count(" | ") == 2]
    assert len(short_rows) == sum(len(declared_short_names(schema)) for schema in schemas)
