"""Secrets in the environment and the arguments of a run, and a reward function that prints and raises them.

out = run(["ppo", *prepare(tmp_path, overrides)])
assert leaks(tmp_path / "run") == []
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from camshaft.data.tables import write_parquet
from support.ppo_runs import ppo_args

NAMES = (
    *(
        "OPENAI_API_KEY",
        "OPENAI_API_KEY_2",
        "HF_TOKEN",
        "GITHUB_PAT",
        "SLACK_WEBHOOK",
        "TEAMS_WEBHOOK_URL",
        "SENTRY_DSN",
    ),
    *("AWS_SECRET_ACCESS_KEY", "DB_PASS", "DB_PASSWORD", "CLIENT_SECRET", "SESSION_COOKIE", "MY_JWT", "NPM_AUTH"),
    *("WANDB_API_KEY", "PROXY_AUTHORIZATION", "GOOGLE_CREDENTIALS", "SSH_PASSPHRASE"),
)
"""Environment variables whose values are secret."""
KEYS = (
    *("api_key", "apiKey", "bearer", "pat", "webhook", "dsn", "hf_token", "client_secret", "password", "auth", "pwd"),
    *("cookie", "accessToken", "private_key", "jwt"),
)
"""Names of `reward_kwargs` whose values are secret."""

ENVIRONMENT = {name: f"env-secret-{number:02}-{name.lower()}" for number, name in enumerate(NAMES)}
ENVIRONMENT |= {
    "DATABASE_URL": "postgres://me:env-secret-dsn-pass@host/db",
    "HTTP_PROXY_LIKE": "http://env-secret-user-token@proxy:80",
    "PEM_PRIVATE_KEY": "-----BEGIN KEY-----\nZW52LXNlY3JldC1wZW0tMQ==\nZW52LXNlY3JldC1wZW0tMg==\n-----END KEY-----",
}
KWARGS = {name: f"kwarg-secret-{number:02}" for number, name in enumerate(KEYS)}
NESTED = [
    "headers={Authorization: 'Bearer kwarg-secret-header', all: [{x-api-key: kwarg-secret-list}]}",
    "credentials={openai: kwarg-secret-below}",
    "judge='https://me:kwarg-secret-url-pass@host/v1?access_token=kwarg-secret-query'",
    "blob='https://store/x?sig=kwarg-secret-signature'",
]
MARKS = ("env-secret", "kwarg-secret", "runtime-secret", "ZW52LXNl", "argument-secret")
"""Parts of all secrets."""
NUM_SECRETS = len(NAMES) + 4 + len(KEYS) + 6

REWARD = """
import os, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    secrets = [value for name, value in os.environ.items() if name in {names!r}]
    text = f"\\x1b[31m{{kwargs}} {{secrets}} https://a:argument-secret-pass@host/v1?key=argument-secret-query"
    print(text)
    for value in [*secrets, *map(str, kwargs.values())]:
        middle = len(value) // 2
        os.write(2, value[:middle].encode())
        time.sleep(0.01)
        os.write(2, value[middle:].encode() + b"\\n")
    os.write(2, b"left of a line " + secrets[0].encode())
    if sum(map(ord, solution_str)) % 2:
        raise ValueError(text)
    return 1.0
"""


def prepare(folder: Path, overrides: dict[str, Any]) -> list[str]:
    """Return the arguments of a run, and write its files. A ground truth of the data equals a secret."""
    section = "custom_reward_function"
    (folder / "reward.py").write_text(REWARD.format(names=set(ENVIRONMENT)))
    settings = {
        "trainer.total_training_steps": 2,
        "trainer.total_epochs": 1,
        "trainer.save_freq": 1,
        "trainer.test_freq": 2,
        "trainer.log_val_generations": 2,
        f"{section}.path": folder / "reward.py",
        f"{section}.on_error": "zero",
        **overrides,
    }
    arguments = ppo_args(folder, settings)
    rows = pq.read_table(folder / "data" / "train.parquet").to_pylist()
    for row in rows:
        row["reward_model"]["ground_truth"] = ENVIRONMENT["OPENAI_API_KEY"]
    write_parquet(folder / "data" / "train.parquet", rows)
    arguments += [f"+{section}.reward_kwargs.{name}={value}" for name, value in KWARGS.items()]
    return arguments + [f"+{section}.reward_kwargs.{argument}" for argument in NESTED]


def run(arguments: list[str], **variables: str) -> str:
    """Run a command and return what it prints."""
    environment = {**os.environ, **ENVIRONMENT, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **variables}
    result = subprocess.run(
        [sys.executable, "-m", "camshaft", *arguments],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=250, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-5000:]
    return result.stdout


def leaks(folder: Path) -> list[tuple[str, str]]:
    """Return the files below a folder, except samples, that contain a part of a secret in their content or name."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "samples"]
    contents = {path: path.read_bytes() + str(path.relative_to(folder)).encode() for path in files}
    return [(str(path), mark) for path, content in contents.items() for mark in MARKS if mark.encode() in content]
