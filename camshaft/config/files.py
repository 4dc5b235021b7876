"""Checks of the files and folders that a config names. They run on the driver before any process is started."""

import difflib
import glob
import importlib.util
import os.path
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from camshaft import hub
from camshaft.config.errors import Problem
from camshaft.config.model_settings import read_tokenizer
from camshaft.config.run_folder import check_run_name
from camshaft.config.schema.agents import AGENT_KEY, KEY, TOOLS_KEY, MultiTurnConfig
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.model import AnyModelConfig, CheckpointConfig, ModelSource
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.reward import CustomRewardConfig, split_function
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.config.schema.trainer import HOOKS_KEY
from camshaft.fetch import cache_folder
from camshaft.plugins import function_file, install_command
from camshaft.storage import is_url

DATA_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Suffixes of data files, before an optional `.gz`. In a folder with several, the first one counts."""
_DATASET = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<config>[\w.-]+))?(?::(?P<split>\w+))?"
)
_SPLITS_FILE = "dataset_dict.json"
"""Marks a folder that `DatasetDict.save_to_disk` has written."""


def select_data_files(names: Iterable[str]) -> list[str]:
    """Select the data files of a folder from the names of its files, in alphabetical order."""
    data_names = [name for name in sorted(names) if not name.startswith("cache-")]  # caches of the datasets library
    for suffix in DATA_SUFFIXES:
        if selected := [name for name in data_names if name.removesuffix(".gz").endswith(suffix)]:
            return selected
    return []


class DatasetName(NamedTuple):
    """Name of a data set of the Hugging Face Hub."""

    repository: str
    config: str | None
    split: str | None

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        return f"{self.repository}{config}" + (f":{self.split}" if self.split else "")

    def cached_file(self) -> Path:
        """Return the file in the cache that contains the split once it has been downloaded."""
        folder = cache_folder("datasets").joinpath(self.repository, self.config or "")
        return folder / f"{self.split or 'default-split'}.parquet"


def dataset_name(path: str | Path) -> DatasetName | None:
    """Return the data set that a path names, or None for the path of a file or folder, and for other URLs.

    A name is `owner/name`, `owner/name/config` or one of them with `:split`. As a URL it starts with `hf://` or
    `hf://datasets/`. A path whose first folder exists is not a name, so that a misspelled local path is not sent to the
    hub.
    """
    text = str(path)
    match = _DATASET.fullmatch(text.removeprefix(hub.SCHEME).removeprefix("datasets/"))
    if match is None or text.removesuffix(".gz").endswith(DATA_SUFFIXES):
        return None
    if not text.startswith(hub.SCHEME) and (os.path.exists(text) or os.path.isdir(text.partition("/")[0])):
        return None
    return DatasetName(**match.groupdict())


def data_folder_error(names: Collection[str]) -> str | None:
    """Return why a folder with these entries cannot be read as data; None if it can."""
    if _SPLITS_FILE in names:
        return "contains a dataset with several splits. Set the folder of one split, for example its subfolder train."
    if not select_data_files(names):
        endings = ", ".join(DATA_SUFFIXES)
        return f"is a folder without data files. Set a file, or a folder with files that end in {endings}."
    return None


REQUIRED_CONTENTS = ("model", "optimizer", "extra")
"""Checkpoint contents that are required to resume a run."""


def check_ppo_files(config: PPOConfig) -> Iterator[Problem]:
    """Check the data files, the models and the scoring function of an RL run."""
    trainer, model = config.trainer, config.actor_rollout_ref.model
    yield from check_run_name(trainer)
    yield from _check_hooks(trainer.on_step)
    yield from check_data_files("data.train_files", config.data.train_files, "actor_rollout_ref.model", model)
    yield from check_data_files("data.val_files", config.data.val_files, "actor_rollout_ref.model", model)
    yield from check_model("actor_rollout_ref.model", model, not model.random_init)
    if config.data.tokenizer is not None:
        yield from check_tokenizer("data.tokenizer", config.data.tokenizer, "actor_rollout_ref.model", model)
    if config.needs_critic():
        yield from check_model("critic.model", config.critic.model)
        yield from _check_critic_tokenizer(config)
    yield from check_adapter_folder("actor_rollout_ref.model", model)
    if config.needs_critic():
        yield from check_adapter_folder("critic.model", config.critic.model)
    if trainer.resume_from_path is not None:
        yield from check_folder("trainer.resume_from_path", trainer.resume_from_path)
    if config.needs_function():
        yield from _check_reward_file(config.custom_reward_function)
    yield from _check_environments("actor_rollout_ref.rollout", config.actor_rollout_ref.rollout.multi_turn)
    if config.needs_reward_engine():
        yield from _check_reward_model(config)


def check_supervised_files(config: SupervisedConfig) -> Iterator[Problem]:
    """Check the data files, the model and the run folder of a supervised run."""
    yield from check_run_name(config.trainer)
    yield from _check_hooks(config.trainer.on_step)
    yield from check_data_files("data.train_files", config.data.train_files, "model", config.model)
    yield from check_data_files("data.val_files", config.data.val_files, "model", config.model)
    yield from check_model("model", config.model, not config.model.random_init)
    yield from check_adapter_folder("model", config.model)


def check_generate_files(config: GenerateConfig) -> Iterator[Problem]:
    """Check the prompts, the model and the scoring function of `camshaft generate`.

    The run itself checks whether an existing output file was written with the same settings.
    """
    yield from check_data_files("data.path", config.data.path, "model", config.model)
    yield from check_model("model", config.model)
    if config.data.tokenizer is not None:
        yield from check_tokenizer("data.tokenizer", config.data.tokenizer, "model", config.model)
    output = config.data.output_path
    if os.path.isdir(output):
        yield Problem("data.output_path", output, f"is a folder. Set a file, for example {output}/responses.parquet.")
    yield from _check_reward_file(config.custom_reward_function)
    yield from _check_environments("rollout", config.rollout.multi_turn)


def check_eval_files(config: EvalConfig) -> Iterator[Problem]:
    """Check the responses and the scoring function of `camshaft eval`, and reject existing output files."""
    yield from check_data_files("data.path", config.data.path)
    yield from _check_reward_file(config.custom_reward_function)
    outputs = {"data.output_path": config.data.output_path, "data.metrics_path": config.data.metrics_path}
    for key, output in outputs.items():
        if output is not None and os.path.exists(output):
            yield Problem(key, output, "already exists. Set another file, or remove it.")
        elif output is not None and not Path(output).absolute().parent.is_dir():
            yield Problem(key, output, f"the folder {Path(output).absolute().parent} does not exist. Create it.")


def _check_reward_file(custom: CustomRewardConfig) -> Iterator[Problem]:
    key = "custom_reward_function.functions" if custom.functions else "custom_reward_function.path"
    yield from _check_function_files(key, [function.path for function in custom.selected()])


def _check_environments(section: str, multi_turn: MultiTurnConfig) -> Iterator[Problem]:
    """Check that the files of environments or of the program exist, and that the names of environments differ."""
    tools = [target.rpartition(":")[0] for target in multi_turn.tools]
    yield from _check_function_files(f"{section}.{TOOLS_KEY}", tools)
    for target in multi_turn.tools:
        if ":" not in target:
            message = (
                f"{target} names no function. Set {section}.{TOOLS_KEY}={target}:name, or several names with commas."
            )
            yield Problem(f"{section}.{TOOLS_KEY}", multi_turn.tools, message)
    key, selected = f"{section}.{KEY}", multi_turn.selected()
    paths = [target.rpartition(":")[0] or target for _, target in selected]
    yield from _check_function_files(key, paths)
    yield from _check_function_files(f"{section}.{AGENT_KEY}", [function_file(multi_turn.agent or "")])
    names = [name for name, _ in selected]
    for name in sorted({name for name in names if names.count(name) > 1}):
        message = f"selects two environments with the name {name}. Rename one of the classes."
        yield Problem(key, multi_turn.environment, message)


def _check_function_files(key: str, paths: Iterable[str | None]) -> Iterator[Problem]:
    for path in dict.fromkeys(paths):
        if path is not None and (path.endswith(".py") or "/" in path) and not os.path.isfile(path):
            yield _missing(key, path, "file")


def _check_hooks(hooks: Iterable[str]) -> Iterator[Problem]:
    """Check that each hook is a function of a file that exists, or of a module."""
    key, parts = HOOKS_KEY, [split_function(text) for text in hooks]
    yield from _check_function_files(key, [path for path, _ in parts])
    for path, name in parts:
        if path is None and ":" not in (name or ""):
            yield Problem(key, name, "must be a function. Set file.py:function, or package.module:function.")


def check_data_files(
    key: str, paths: tuple[str, ...], section: str = "", model: ModelSource | None = None
) -> Iterator[Problem]:
    """Check that local files and folders exist, and that patterns match files. URLs are checked when downloaded.

    `model`, in the config section `section`, permits or forbids to download data sets of the Hugging Face Hub.
    """
    for path in paths:
        if (name := dataset_name(path)) is not None:
            forbidden = f"{section}.download" if model is not None and not model.download else None
            yield from _check_dataset(key, path, name, forbidden)
        elif is_url(path) or os.path.isfile(path):
            continue
        elif os.path.isdir(path):
            if error := data_folder_error(os.listdir(path)):
                yield Problem(key, path, error)
        elif not glob.has_magic(path):
            yield _missing(key, path, "file")
        elif not glob.glob(path):
            yield Problem(key, path, f"no file matches{_working_folder(path)}.")


def _check_dataset(key: str, path: str, name: DatasetName, forbidden: str | None) -> Iterator[Problem]:
    """Check that a data set of the Hugging Face Hub can be read, and that validation does not read training data.

    `forbidden` is the key that forbids downloads, if it does.
    """
    if name.split is None and key == "data.val_files":
        yield Problem(key, path, f"is a data set without a split. Set one, for example {name._replace(split='test')}.")
    elif name.cached_file().is_file():
        return
    elif forbidden is not None:
        message = (
            f"is no file or folder, and the data set is not in the cache ({name.cached_file()}). Set {forbidden}=true "
            "to download it, or set the path of a file."
        )
        yield Problem(key, path, message, (forbidden,))
    elif importlib.util.find_spec("datasets") is None:
        fix = f"Run {install_command('datasets')}, or set the path of a file."
        yield Problem(key, path, f"is no file or folder, and data sets of the hub require the library datasets. {fix}")


def check_folder(key: str, path: str) -> Iterator[Problem]:
    """Check that a local folder exists."""
    if not is_url(path) and not os.path.isdir(path):
        yield _missing(key, path, "folder")


def check_model(section: str, model: ModelSource, weights: bool = True) -> Iterator[Problem]:
    """Check that a local folder contains a model, or that a model name is cached or may be downloaded."""
    key, path = f"{section}.path", model.path
    if os.path.isdir(path):
        if not os.path.isfile(f"{path}/config.json"):
            yield Problem(key, path, "is a folder without config.json. Set a Hugging Face model folder.")
    elif not is_url(model.source()) and hub.cached_folder(path, weights) is None:
        yield _missing_model(key, path, section, model)


def check_tokenizer(key: str, path: str, section: str, model: ModelSource) -> Iterator[Problem]:
    """Check that a local folder exists, or that a model name is cached or may be downloaded like `model`."""
    if not os.path.isdir(path) and not is_url(model.source(path)) and hub.cached_folder(path, weights=False) is None:
        yield _missing_model(key, path, section, model)


def _missing_model(key: str, path: str, section: str, model: ModelSource) -> Problem:
    if path == os.path.expanduser(str(type(model).model_fields["path"].default)):
        return Problem(key, path, f"is not set, and the default does not exist. Set {key} to the folder of a model.")
    if not hub.is_model_name(path) or os.path.isdir(path.partition("/")[0]):
        return _missing(key, path, "folder")
    place = f"not found{_working_folder(path)}, and not completely in the Hugging Face cache ({hub.cache_path()})"
    fix = "Unset HF_HUB_OFFLINE" if model.download else f"Set {section}.download=True"
    return Problem(key, path, f"folder {place}. {fix} to download the model, or set another path.")


def check_contents(key: str, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Check that checkpoints contain everything that a run needs to resume."""
    contents = checkpoint.save_contents
    missing = [name for name in REQUIRED_CONTENTS if name not in contents]
    if missing:
        fix = ",".join([*REQUIRED_CONTENTS, *(["hf_model"] if "hf_model" in contents else [])])
        message = (
            f"{', '.join(missing)} must be saved, because resuming requires {', '.join(REQUIRED_CONTENTS)}."
            f" Set '{key}.save_contents=[{fix}]'."
        )
        yield Problem(f"{key}.save_contents", contents, message)


def check_adapter_folder(key: str, model: AnyModelConfig) -> Iterator[Problem]:
    """Check that the folder of the initial LoRA adapter exists."""
    path = model.lora_adapter_path
    if path is not None and model.lora_rank:
        yield from check_folder(f"{key}.lora_adapter_path", path)


def _missing(key: str, path: str, kind: str) -> Problem:
    return Problem(key, path, f"{kind} not found{_working_folder(path)}.{_nearest(path)}")


def _nearest(path: str) -> str:
    """Return a suggestion, the entry of the folder with the most similar name, or an empty string."""
    parent = Path(path).parent
    names = os.listdir(parent) if os.access(parent, os.R_OK) and parent.is_dir() else []
    matches = difflib.get_close_matches(Path(path).name, names, n=1)
    return f" Did you mean {parent / matches[0]}?" if matches else ""


def _working_folder(path: str) -> str:
    """Return a note with the working directory, in which a relative path was looked up."""
    return "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"


def _check_critic_tokenizer(config: PPOConfig) -> Iterator[Problem]:
    """Check that critic and actor have the same vocabulary, because the critic reads the actor's token IDs."""
    key, model = "critic.model.tokenizer_path", config.critic.model
    critic_tokenizer, actor_tokenizer = model.tokenizer_path, _policy_tokenizer(config)
    if critic_tokenizer == actor_tokenizer:
        return
    yield from check_tokenizer(key, critic_tokenizer, "critic.model", model)
    if _vocabularies_differ(critic_tokenizer, actor_tokenizer):
        message = (
            "differs from the actor's tokenizer, but the critic reads the actor's token IDs. Set "
            f"{key}={actor_tokenizer}."
        )
        yield Problem(key, critic_tokenizer, message, ("data.tokenizer", "actor_rollout_ref.model.path"))


def _check_reward_model(config: PPOConfig) -> Iterator[Problem]:
    """Check the model folder, and that `input_tokenizer` has the vocabulary of the policy's tokenizer."""
    model, key = config.reward_model.model, "reward_model.model.input_tokenizer"
    policy_tokenizer = _policy_tokenizer(config)
    yield from check_model("reward_model.model", model)
    related = ("reward_model.model.path", "data.tokenizer", "actor_rollout_ref.model.path")
    if model.input_tokenizer is None:
        if _vocabularies_differ(model.path, policy_tokenizer):
            message = (
                "means that the reward model reads the policy's token IDs, but the tokenizers differ: "
                f"{model.path} and {policy_tokenizer}. Set {key}={policy_tokenizer}, so that responses are decoded "
                "to text."
            )
            yield Problem(key, None, message, related)
        return
    yield from check_tokenizer(key, model.input_tokenizer, "reward_model.model", model)
    if _vocabularies_differ(model.input_tokenizer, policy_tokenizer):
        message = f"must be the policy's tokenizer, because it decodes the responses. Set {key}={policy_tokenizer}."
        yield Problem(key, model.input_tokenizer, message, related)


def _policy_tokenizer(config: PPOConfig) -> str:
    return config.data.tokenizer or config.actor_rollout_ref.model.path


def _vocabularies_differ(path: str, other: str) -> bool:
    """Return True if two tokenizers define different token IDs. False if this machine lacks a `tokenizer.json`."""
    entries, other_entries = read_tokenizer(path), read_tokenizer(other)
    if entries is None or other_entries is None:
        return False
    return (entries.vocabulary, entries.added) != (other_entries.vocabulary, other_entries.added)
