"""without_secrets removes secrets from a config and keeps all other values."""

import json
from pathlib import Path

import pytest

from camshaft.config import PPOConfig, compose, load_ppo, show, without_secrets
from camshaft.config.tree import flatten, get, leaf_fields
from camshaft.errors import ConfigError
from camshaft.masking import mask_text, mask_yaml, secret_values

SECRET = "hunter2"


def redacted(words: list[str], *more: str) -> dict:
    public = without_secrets(load_ppo([*words, *more]))
    assert SECRET not in json.dumps(public)
    return public


def test_values_without_secrets_are_unchanged(words):
    config = load_ppo(words)
    public = without_secrets(config)
    assert set(config.model_dump(mode="json")) - set(public) == {"ray_kwargs"}
    leaves = leaf_fields(type(config))
    expected = flatten(config.model_dump(mode="json", exclude={"ray_kwargs"}), leaves)
    assert flatten(public, leaves) == expected
    assert "data.prompt_key" in expected  # a key of the schema is never hidden by its name


def test_ray_kwargs_are_omitted(words):
    ray = "+ray_kwargs.ray_init"
    public = redacted(words, f"{ray}.runtime_env.env_vars.WANDB_API_KEY={SECRET}", f"{ray}._redis_password={SECRET}")
    assert "ray_kwargs" not in public


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"s3://key:{SECRET}@bucket/run", "s3://key:***@bucket/run"),
        (f"hdfs://me:{SECRET}@host:8020/run@2", "hdfs://me:***@host:8020/run@2"),
        (f"https://{SECRET}@host/run", "https://***@host/run"),
        (f"https://host/run?sig={SECRET}&version=1", "https://host/run?sig=***&version=***"),
        (f"simplecache::ftp://me:{SECRET}@host/run", "simplecache::ftp://me:***@host/run"),
        ("abfs://container@account/run", "abfs://container@account/run"),
        ("hdfs://host:8020/run", "hdfs://host:8020/run"),
    ],
)
def test_secrets_in_urls_are_hidden(words, url, shown):
    public = redacted(words, f"trainer.default_hdfs_dir='{url}'")
    assert public["trainer"]["default_hdfs_dir"] == shown


@pytest.mark.parametrize(
    "name", ["api_key", "OPENAI_API_KEY", "apikey", "hf_token", "client_secret", "password", "Authorization", "auth"]
)
def test_user_keys_that_name_secrets_are_hidden(words, name, tmp_path):
    (tmp_path / "mine.py").touch()
    section = "custom_reward_function"
    public = redacted(
        words,
        f"{section}.path={tmp_path}/mine.py",
        f"+{section}.reward_kwargs.{name}={SECRET}",
        f"+{section}.reward_kwargs.headers={{{name}: {SECRET}, all: [{{{name}: {SECRET}}}]}}",
        f"+{section}.reward_kwargs.judge='http://me:{SECRET}@host/v1'",
        f"+{section}.reward_kwargs.max_tokens=5",
        f"+{section}.reward_kwargs.style=terse",
    )
    assert get(public, f"{section}.reward_kwargs") == {
        name: "***",
        "headers": {name: "***", "all": [{name: "***"}]},
        "judge": "http://me:***@host/v1",
        "max_tokens": 5,
        "style": "terse",
    }


def test_a_path_with_a_question_mark_is_not_a_url(words, tmp_path: Path):
    (tmp_path / "a?b=c.parquet").touch()
    public = redacted(words, f"data.train_files={tmp_path}/a?b=c.parquet")
    assert public["data"]["train_files"] == [f"{tmp_path}/a?b=c.parquet"]


def test_a_printed_config_has_no_secrets(words, capfd):
    """`--cfg job` prints all keys, and `--cfg all` prints the overrides too."""
    section = "custom_reward_function"
    secrets = [
        f"+{section}.reward_kwargs.api_key={SECRET}",
        f"+{section}.reward_kwargs.headers={{Authorization: {SECRET}}}",
        f'+{section}.reward_kwargs.client_secret="-----BEGIN\\n{SECRET}\\n-----END"',
        f"+{section}.reward_kwargs.judge='http://me:{SECRET}@host/v1?sig={SECRET}'",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY={SECRET}",
    ]
    for kind in ("job", "all"):
        assert compose([*words, *secrets, "--cfg", kind], PPOConfig) == []
        out = capfd.readouterr().out
        assert SECRET not in out
        assert "api_key: ***" in out
        assert "prompt_key: prompt" in out
        assert "http://me:***@host/v1?sig=***" in out


def test_show_prints_defaults_only():
    assert "***" not in show()


def test_a_masked_config_is_unchanged_elsewhere(words, capfd):
    assert compose([*words, "--cfg", "job"], PPOConfig) == []
    out = capfd.readouterr().out
    assert "***" not in out
    assert "prompt_id_key: null" in out


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("api_key:\n- a\n- b\nmodel: x\n", "api_key: ***\nmodel: x\n"),
        ("my:\n  password: |-\n    one\n\n    two\n  name: n\n", "my:\n  password: ***\n  name: n\n"),
        ("- a.b.hf_token=abc def\n", "- a.b.hf_token=***\n"),
        ("tokens: 5\nkeyboard: 3\n", "tokens: 5\nkeyboard: 3\n"),
    ],
)
def test_secrets_of_several_lines_are_hidden(text, masked):
    assert mask_yaml(text, ()) == masked


def test_messages_lose_the_values_of_secret_names():
    environment = {"OPENAI_API_KEY": "sk-hunter2", "PWD": "/home/me", "SHORT_TOKEN": "a", "USE_AUTH": "true"}
    kwargs = {"headers": {"Authorization": "Bearer x"}, "urls": ["https://me:geheim@host"], "model": "visible"}
    secrets = secret_values(environment, kwargs)
    assert sorted(secrets) == ["Bearer x", "geheim", "sk-hunter2"]
    text = "in /home/me: true: a visible sk-hunter2, 'Bearer x', geheim, https://a:other@b/c?key=v"
    assert mask_text(text, secrets) == "in /home/me: true: a visible ***, '***', ***, https://a:***@b/c?key=***"


@pytest.mark.parametrize(
    "override",
    [
        f"+custom_reward_function.reward_kwarg.api_key={SECRET}",
        f"+trainer.hf_token={SECRET}",
        f"trainer.nnodes=https://me:{SECRET}@host",
        f"trainer.nnodes={{password: {SECRET}}}",
    ],
)
def test_config_errors_contain_no_secrets(words, override):
    with pytest.raises(ConfigError, match=r"\*\*\*") as raised:
        load_ppo([*words, override])
    assert SECRET not in str(raised.value)
