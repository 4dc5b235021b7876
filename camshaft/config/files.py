"""What a config names on disk: checked on the driver, before anything is started. Used by `checks.py`."""

import glob
import json
import os.path
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from camshaft.config.problems import Problem
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.model import AnyModelConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.reward import CustomRewardConfig
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.storage import is_url


def ppo_files(config: PPOConfig) -> Iterator[Problem]:
    """Data, models and the scoring function of an RL run."""
    trainer, model = config.trainer, config.actor_rollout_ref.model
    yield from data_files("data.train_files", config.data.train_files)
    yield from data_files("data.val_files", config.data.val_files)
    yield from model_folder("actor_rollout_ref.model.path", model.path)
    if config.data.tokenizer is not None:
        yield from folder("data.tokenizer", config.data.tokenizer)
    if config.needs_critic():
        yield from model_folder("critic.model.path", config.critic.model.path)
        yield from _critic_tokenizer(config)
    models = {
        "actor_rollout_ref.model": model,
        **({"critic.model": config.critic.model} if config.needs_critic() else {}),
    }
    for key, of in models.items():
        yield from adapter_folder(key, of)
    if trainer.resume_from_path is not None:
        yield from folder("trainer.resume_from_path", trainer.resume_from_path)
    if config.needs_function():
        yield from _reward_file(config.custom_reward_function)
    if config.needs_reward_engine():
        yield from _reward_model(config)


def supervised_files(config: SupervisedConfig) -> Iterator[Problem]:
    """Data and model of a supervised run."""
    yield from data_files("data.train_files", config.data.train_files)
    yield from data_files("data.val_files", config.data.val_files)
    yield from model_folder("model.path", config.model.path)
    yield from adapter_folder("model", config.model)


def generate_files(config: GenerateConfig) -> Iterator[Problem]:
    """Prompts, model and scoring function of `camshaft generate`; what is at its output, the run looks at."""
    yield from data_files("data.path", config.data.path)
    yield from model_folder("model.path", config.model.path)
    if config.data.tokenizer is not None:
        yield from folder("data.tokenizer", config.data.tokenizer)
    output = config.data.output_path
    if os.path.isdir(output):
        yield Problem("data.output_path", output, f"is a folder. Name a file, for instance {output}/responses.parquet.")
    yield from _reward_file(config.custom_reward_function)


def eval_files(config: EvalConfig) -> Iterator[Problem]:
    """Responses and scoring function of `camshaft eval`; what it writes must not be there yet."""
    yield from data_files("data.path", config.data.path)
    yield from _reward_file(config.custom_reward_function)
    outputs = {"data.output_path": config.data.output_path, "data.metrics_path": config.data.metrics_path}
    for key, output in outputs.items():
        if output is not None and os.path.exists(output):
            yield Problem(key, output, "is there already. Name another file, or remove it.")
        elif output is not None and not Path(output).absolute().parent.is_dir():
            yield Problem(key, output, f"there is no folder {Path(output).absolute().parent} to write to.")


def _reward_file(custom: CustomRewardConfig) -> Iterator[Problem]:
    path = custom.path
    if path is not None and (path.endswith(".py") or "/" in path) and not os.path.isfile(path):
        yield _missing("custom_reward_function.path", path, "file")


def data_files(key: str, paths: tuple[str, ...]) -> Iterator[Problem]:
    """Files, folders and patterns of this machine; what a URL names is seen when it is fetched."""
    for path in paths:
        if is_url(path) or os.path.isfile(path):
            continue
        if os.path.isdir(path):
            if not any(Path(path).glob("*.parquet")):
                yield Problem(key, path, "is a folder without parquet files. Name one that has some, or a file.")
        elif not glob.has_magic(path):
            yield _missing(key, path, "file")
        elif not glob.glob(path):
            yield Problem(key, path, f"no file is called like that{_seen(path)}.")


def folder(key: str, path: str) -> Iterator[Problem]:
    if not is_url(path) and not os.path.isdir(path):
        yield _missing(key, path, "folder")


def model_folder(key: str, path: str) -> Iterator[Problem]:
    if is_url(path):
        return
    if os.path.isdir(path):
        if not os.path.isfile(f"{path}/config.json"):
            yield Problem(key, path, "is a folder without config.json; it must be in the Hugging Face layout.")
        return
    hint = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        name = path.partition("/")[2]
        hint = f"\nIf it is a name on the Hugging Face hub: hf download {path} --local-dir models/{name}"
        hint += f"\nand type {key}=models/{name}"
    yield _missing(key, path, "folder", hint)


def adapter_folder(key: str, model: AnyModelConfig) -> Iterator[Problem]:
    """The adapter that training starts from, if one is named."""
    path = model.lora_adapter_path
    if path is not None and model.lora_rank:
        yield from folder(f"{key}.lora_adapter_path", path)


def _missing(key: str, path: str, kind: str, hint: str = "") -> Problem:
    return Problem(key, path, f"there is no such {kind}{_seen(path)}.{hint}")


def _seen(path: str) -> str:
    return "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"


def _critic_tokenizer(config: PPOConfig) -> Iterator[Problem]:
    """The critic reads token ids that the actor's tokenizer made, so both must number the same tokens."""
    key, mine, actors = "critic.model.tokenizer_path", config.critic.model.tokenizer_path, config.tokenizer_path()
    if mine == actors:
        return
    yield from folder(key, mine)
    ours, theirs = _vocabulary(mine), _vocabulary(actors)
    if ours is not None and theirs is not None and ours != theirs:
        sentence = f"is another tokenizer than the actor's, {actors}. A critic must read the actor's token ids."
        yield Problem(key, mine, sentence, ("data.tokenizer", "actor_rollout_ref.model.path"))


def _reward_model(config: PPOConfig) -> Iterator[Problem]:
    """Its folder; and whose token ids it reads, by which it follows how it has to be told."""
    model, policys, key = config.reward_model.model, config.tokenizer_path(), "reward_model.model.input_tokenizer"
    yield from model_folder("reward_model.model.path", model.path)
    rests_on = ("reward_model.model.path", "data.tokenizer", "actor_rollout_ref.model.path")
    if model.input_tokenizer is None:
        theirs, ours = _vocabulary(model.path), _vocabulary(policys)
        if theirs is not None and ours is not None and theirs != ours:
            sentence = (
                f"says that the reward model reads the policy's token ids, and the tokenizers differ: {model.path} and"
                f" {policys}. Type {key}={policys}, so that responses go over as text."
            )
            yield Problem(key, None, sentence, rests_on)
        return
    yield from folder(key, model.input_tokenizer)
    mine, ours = _vocabulary(model.input_tokenizer), _vocabulary(policys)
    if mine is not None and ours is not None and mine != ours:
        sentence = f"must be the tokenizer that the responses are in. Type {key}={policys}."
        yield Problem(key, model.input_tokenizer, sentence, rests_on)


def _vocabulary(path: str) -> Any:
    """What numbers the tokens, or None if the folder does not tell in `tokenizer.json`.

    The rest of that file changes where transformers reads and writes it once, as an export does.
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    added = {token.get("id"): token.get("content") for token in content.get("added_tokens", ())}
    return content.get("model", {}).get("vocab"), added
