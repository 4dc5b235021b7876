"""without_secrets removes secrets from a config and keeps all other values."""

import json
from pathlib import Path

import pytest

from camshaft.config import load_ppo, without_secrets
from camshaft.config.tree import flatten, get, leaf_fields

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
