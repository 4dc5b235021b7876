"""without_secrets removes secrets from a config and keeps all other values."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from camshaft.config import PPOConfig, compose, load_ppo, show, without_secrets
from camshaft.config.render import SCHEMAS
from camshaft.config.tree import flatten, get, leaf_fields
from camshaft.errors import ConfigError
from camshaft.masking import (
    is_secret_name,
    mask_text,
    mask_value,
    mask_yaml,
    printable,
    remember_secrets,
    secret_values,
)

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
    assert mask_yaml(text) == masked


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that sets environment variables, whose secrets are masked during the test."""

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        remember_secrets()

    yield set_variables
    monkeypatch.undo()
    remember_secrets()


def test_messages_lose_the_values_of_secret_names(environment):
    environment(JUDGE_API_KEY="sk-hunter2", SHORT_TOKEN="abc", USE_AUTH="true", DB_URL="pg://me:geheimnis@host/d")
    text = "abc: true: a visible sk-hunter2, geheimnis, https://a:other@b/c?key=v"
    assert mask_text(text) == "abc: true: a visible ***, ***, https://a:***@b/c?key=***"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("Bearer sk-hunter2", "the server rejects sk-hunter2"),
        ("p@ss word/1", "GET /?pw=p%40ss%20word%2F1"),
        ('quoted"secret', json.dumps({"pw": 'quoted"secret'})),
        ("-----BEGIN KEY-----\nc2VjcmV0MQ==\nc2VjcmV0Mg==\n-----END KEY-----", "key starts with c2VjcmV0Mg=="),
        ("c2VjcmV0MQ==\nc2VjcmV0Mg==", repr("c2VjcmV0MQ==\nc2VjcmV0Mg==")),
        ("/secret/looks+like/a/path==", "bad key /secret/looks+like/a/path=="),
    ],
)
def test_other_forms_of_a_secret_are_masked(value, text, environment):
    environment(JUDGE_API_KEY=value)
    masked = mask_text(text)
    assert "***" in masked
    assert not any(part in masked for part in ("hunter", "ss%20", "quoted", "c2Vj", "looks"))


def test_a_path_in_a_secret_variable_is_readable(environment, tmp_path):
    environment(CREDENTIALS=str(tmp_path), SECRETS_DIR=str(tmp_path / "missing"), PWD=str(tmp_path))
    assert mask_text(f"saved to {tmp_path}/run, {tmp_path}/missing") == f"saved to {tmp_path}/run, {tmp_path}/missing"


@pytest.mark.parametrize("schema", SCHEMAS.values())
def test_no_key_of_a_schema_is_masked(schema):
    names = {part for key in leaf_fields(schema) for part in key.split(".")}
    assert not [name for name in names if is_secret_name(name)]


PUBLIC = """
PATH HOME SSH_AUTH_SOCK TOKENIZERS_PARALLELISM KEYBOARD MONKEY OLDPWD AUTHOR HF_TOKEN_PATH XAUTHORITY
AWS_ACCESS_KEY_ID tokenizer max_token_len ppo_max_token_len_per_gpu prompt_key image_key images_key reward_fn_key
data.video_key teacher_key max_tokens eos_token pad_token stop_token keys tokens pattern pathology assign code_style
"""
SECRET_NAMES = """
bearer pat webhook dsn GITHUB_PAT SLACK_WEBHOOK SLACK_WEBHOOK_URL SENTRY_DSN DB_PASS DATABASE_PASSWORD apiKey
accessToken OPENAI_API_KEY OPENAI_API_KEY_2 HF_TOKEN hf_token x-api-key Authorization Proxy-Authorization cookie
Set-Cookie api_keys client_secret clientsecret AWS_SECRET_ACCESS_KEY private_key credentials passphrase
jwt pwd a.b.token
"""


def test_names_of_secrets_are_told_from_others():
    assert [name for name in PUBLIC.split() if is_secret_name(name)] == []
    assert [name for name in SECRET_NAMES.split() if not is_secret_name(name)] == []


def test_words_below_a_name_that_may_be_secret_are_not_masked_in_texts():
    kwargs = {"answer_token": "</answer>", "metric_key": "accuracy", "judge_token": "tok-4711-abcdef"}
    assert secret_values({**kwargs, "password": "hopefully"}, {"PWD": "/gone/with/the/job"}) == {
        "tok-4711-abcdef",
        "hopefully",
    }


def test_all_values_below_a_secret_name_are_masked():
    value = {"credentials": {"user": "me", "ids": ["a", 12345678]}, "token": 7, "use_auth": True}
    assert mask_value(value) == {"credentials": {"user": "***", "ids": ["***", "***"]}, "token": 7, "use_auth": True}
    assert secret_values(value, {"api_keys": {"a": "long-enough", "b": "short"}}) == {"12345678", "long-enough"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb\rc", "a\\x1b[2Jb\\rc"),
        ("\x9b31m\x07\x7f", "\\x9b31m\\x07\\x7f"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("two\nlines\tand umlauts: \xe4\u20ac\U0001f600", "two\nlines\tand umlauts: \xe4\u20ac\U0001f600"),
    ],
)
def test_messages_do_not_control_the_terminal(text, shown):
    assert printable(text) == shown
    assert str(ConfigError(text)) == shown


@pytest.mark.parametrize(
    "override",
    [
        "+custom_reward_function.reward_kwargs.api_key='sk-open-quote",
        "+custom_reward_function.reward_kwargs.api_key=sk-open-brace{",
        "+custom_reward_function.reward_kwargs.headers={Authorization: 'sk-open-quote",
        "--api_key=sk-no-option",
    ],
)
def test_errors_of_the_parser_contain_no_secrets(words, override):
    with pytest.raises(ConfigError, match=r"\*\*\*") as raised:
        compose([*words, override], PPOConfig)
    assert "sk-" not in str(raised.value)


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
