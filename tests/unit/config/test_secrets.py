"""What others are told of a config holds no secret, and all the rest."""

import json
from pathlib import Path

import pytest

from camshaft.config import load_ppo, without_secrets
from camshaft.config.tree import flatten, get, leaf_fields

SECRET = "hunter2"


def told(words: list[str], *more: str) -> dict:
    found = without_secrets(load_ppo([*words, *more]))
    assert SECRET not in json.dumps(found)
    return found


def test_what_is_no_secret_is_told_as_it_is(words):
    config = load_ppo(words)
    found = without_secrets(config)
    assert set(config.model_dump(mode="json")) - set(found) == {"ray_kwargs"}
    leaves = leaf_fields(type(config))
    wanted = flatten(config.model_dump(mode="json", exclude={"ray_kwargs"}), leaves)
    assert flatten(found, leaves) == wanted
    assert "data.prompt_key" in wanted  # a name of ours, whatever it ends with


def test_what_ray_is_given_is_left_out(words):
    ray = "+ray_kwargs.ray_init"
    found = told(words, f"{ray}.runtime_env.env_vars.WANDB_API_KEY={SECRET}", f"{ray}._redis_password={SECRET}")
    assert "ray_kwargs" not in found


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
def test_a_url_is_told_without_its_password(words, url, shown):
    found = told(words, f"trainer.default_hdfs_dir='{url}'")
    assert found["trainer"]["default_hdfs_dir"] == shown


@pytest.mark.parametrize(
    "name", ["api_key", "OPENAI_API_KEY", "apikey", "hf_token", "client_secret", "password", "Authorization", "auth"]
)
def test_what_a_name_of_the_users_own_says_to_be_secret_is_hidden(words, name, tmp_path):
    (tmp_path / "mine.py").touch()
    section = "custom_reward_function"
    found = told(
        words,
        f"{section}.path={tmp_path}/mine.py",
        f"+{section}.reward_kwargs.{name}={SECRET}",
        f"+{section}.reward_kwargs.headers={{{name}: {SECRET}, all: [{{{name}: {SECRET}}}]}}",
        f"+{section}.reward_kwargs.judge='http://me:{SECRET}@host/v1'",
        f"+{section}.reward_kwargs.max_tokens=5",
        f"+{section}.reward_kwargs.style=terse",
    )
    assert get(found, f"{section}.reward_kwargs") == {
        name: "***",
        "headers": {name: "***", "all": [{name: "***"}]},
        "judge": "http://me:***@host/v1",
        "max_tokens": 5,
        "style": "terse",
    }


def test_a_path_with_a_question_mark_is_no_url(words, tmp_path: Path):
    (tmp_path / "a?b=c.parquet").touch()
    found = told(words, f"data.train_files={tmp_path}/a?b=c.parquet")
    assert found["data"]["train_files"] == [f"{tmp_path}/a?b=c.parquet"]
