"""Config of `camshaft serve`.

config = read_serve_config(["model=models/tiny", "lora_alpha=16"])
config.base_models()                    # {"models/tiny": "models/tiny"}
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from camshaft.config.backends import (
    SHARDED_ENGINE,
    SINGLE_PROCESS_ENGINE,
    engine_capabilities,
    rollout_capabilities,
)
from camshaft.config.composition import parse_override
from camshaft.config.guards import is_list
from camshaft.config.model_settings import ModelSettings, read_settings
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.config.schema.fields import AUTO, Section, Text, key
from camshaft.errors import CamshaftError, ConfigError
from camshaft.hub import is_model_name

LOOPBACK = ("127.0.0.1", "localhost")


class ServeConfig(Section):
    """All keys of `camshaft serve`."""

    model: Text | tuple[Text, ...] = key(
        ..., "Folder of the model that clients may train and sample, or name=folder. A list serves several models."
    )
    engine: Text = key(
        "auto",
        "Training engine: a name, or package.module:Class. auto is reference on one rank, and fsdp on several.",
    )
    engine_kwargs: dict[str, Any] = key(
        {}, "Options of the engine, such as {ulysses_sequence_parallel_size: 2} of fsdp or {optimizer_offload: true}."
    )
    ranks: int = key(
        1,
        "Number of worker processes on each machine, each on one device. Together they train a model, and each of them "
        "samples.",
        ge=1,
    )
    sampling_ranks: int = key(
        0,
        "Number of further worker processes that only sample, each on a device of its own, so that samples and "
        "training run at the same time. With nnodes=N, on each of N machines. 0: the ranks that train also sample.",
        ge=0,
    )
    nnodes: int = key(1, "Number of machines of a Ray cluster. They share `folder`.", ge=1)
    controller: Literal["auto", "local", "ray"] = key(
        "auto",
        "Launcher of the worker processes. local starts them on this machine; ray starts them on a Ray cluster; auto "
        "selects ray for more than one machine.",
    )
    rollout: Text = key("torch", "Rollout that samples: a name, or package.module:Class.")
    lora_alpha: float = key(
        32.0, "Scaling of LoRA adapters. A layer's update is multiplied by lora_alpha / rank.", gt=0
    )
    host: Text = key("127.0.0.1", "Address to listen on. Any other than the loopback address requires keys.")
    port: int = key(8080, "Port to listen on. 0 selects a free one.", ge=0, le=65535)
    folder: Text = key(
        "served", "Folder of the saved weights, the sessions (log.sqlite3), the server's key and log.txt."
    )
    log: Text | None = key(
        None,
        "File of the sessions, commands and results, on a local disk. null is log.sqlite3 in `folder`; set another one "
        "if `folder` is on a network file system.",
    )
    keys: Text | None = key(
        None,
        "File with the digests of further API keys, one `name digest` per line. camshaft serve new_key=NAME adds one.",
    )
    new_key: Text | None = key(None, "Add a key with this name to the file `keys`, print it, and exit.")
    device: Text | None = key(None, "Device type of the worker, such as cpu. null uses an accelerator if there is one.")
    param_dtype: Text = key(
        "auto", "Dtype in which the model computes: float32 or bfloat16. auto is bfloat16 on an accelerator."
    )
    max_model_len: int = key(4096, "Maximum number of tokens of a datum, and of a prompt with its sample.", ge=2)
    max_tokens: int = key(
        16384, "Maximum number of tokens of a micro-batch of the engine; a sample sets its own max_tokens.", ge=1
    )
    max_data: int = key(1024, "Maximum number of datums of a request. The SDK splits larger batches.", ge=1)
    max_megabytes: int = key(64, "Maximum size of the body of a request.", ge=1)
    max_futures: int = key(4096, "Maximum number of pending commands and samples of a session.", ge=1)
    max_models: int = key(2, "Maximum number of models in training. Each has an engine of its own.", ge=1)
    max_samplers: int = key(
        2,
        "Maximum number of base models that are ready to sample. Another one replaces the least recently used one.",
        ge=1,
    )
    max_versions: int = key(
        8, "Maximum number of published sets of weights in host memory. Others are kept in `folder`.", ge=1
    )
    max_published: int = key(
        20,
        "Maximum number of published sets of weights of a model, in memory and in `folder`. The one that has not been "
        "sampled for the longest time is removed. If it has no name, its samplers end.",
        ge=1,
    )
    min_free_gb: float = key(
        1.0, "Free space of the disk of `folder`, in GB, below which commands of models are rejected.", ge=0
    )
    worker_timeout: float = key(
        3600.0, "Seconds after which a call of the worker processes fails, such as saving a model.", gt=0
    )
    session_timeout: float = key(
        600.0, "Seconds without a request after which a session ends. Unsaved models are saved as weights/last.", gt=0
    )
    gap_timeout: float = key(300.0, "Seconds for which commands wait for one with a smaller number.", gt=0)
    result_ttl: float = key(600.0, "Seconds for which a result is kept after a client has fetched it.", gt=0)
    save_every: int = key(
        20,
        "Optimizer steps after which the server saves a state of a model, from which it continues after a crash.",
        ge=1,
    )
    replay_tolerance: float = key(
        0.0,
        "Maximum difference between the result of a command that is executed again after a crash and the delivered "
        "one. Beyond it, the model is closed.",
        ge=0,
    )
    seed: int = key(0, "Number from which the seeds of adapters and samples are derived if a client sets none.", ge=0)

    def base_models(self) -> dict[str, str]:
        """Return the folder of each model by the name under which clients ask for it."""
        entries = (self.model,) if isinstance(self.model, str) else self.model
        named = [entry.partition("=") for entry in entries]
        return {name: folder or name for name, _, folder in named}

    def context_length(self, folder: str) -> int:
        """Return the maximum number of tokens of a row of a model."""
        positions = self.settings(folder).positions()
        return self.max_model_len if positions is None else min(self.max_model_len, positions[1])

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return self.nnodes * self.ranks

    def backend(self) -> str:
        """Return the controller backend, `local` or `ray`."""
        return self.controller if self.controller != AUTO else "ray" if self.nnodes > 1 else "local"

    def engine_name(self) -> str:
        """Return the name of the engine."""
        if self.engine != AUTO:
            return self.engine
        return SHARDED_ENGINE if self.world_size > 1 else SINGLE_PROCESS_ENGINE

    def compute_dtype(self, is_accelerated: bool) -> Literal["float32", "bfloat16"]:
        """Return the dtype in which the model computes."""
        is_half = self.param_dtype == "bfloat16" or (self.param_dtype == AUTO and is_accelerated)
        return "bfloat16" if is_half else "float32"

    def engine_options(self, is_accelerated: bool) -> dict[str, Any]:
        """Return the options of the engine, with the dtype in which the model computes."""
        dtype = self.compute_dtype(is_accelerated)
        precision = {} if dtype == "float32" else {"mixed_precision": {"param_dtype": dtype}}
        return precision | self.engine_kwargs

    def rollout_config(self, folder: str, device: str) -> RolloutEngineConfig:
        """Return the config of the rollout of a base model."""
        return RolloutEngineConfig(
            model_path=folder,
            device=device,
            dtype=self.compute_dtype(device != "cpu"),
            max_model_len=self.context_length(folder),
            seed=self.seed,
        )

    @staticmethod
    def settings(folder: str) -> ModelSettings:
        """Return the settings of a model that `read_serve_config` has found."""
        settings = read_settings(folder, {})
        assert settings is not None
        return settings


def read_serve_config(arguments: Sequence[str]) -> ServeConfig:
    """Return the config that `key=value` arguments describe. Raise ConfigError with all that is wrong in them."""
    values: dict[str, Any] = {}
    problems = list[str]()
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if name not in ServeConfig.model_fields or not equals:
            near = difflib.get_close_matches(name, ServeConfig.model_fields, n=1)
            hint = f"Did you mean {near[0]}=...?" if near else f"The keys are {', '.join(ServeConfig.model_fields)}."
            problems.append(f"'{argument}' is not an argument of camshaft serve. {hint}")
            continue
        # A name=folder is one text, which the grammar of overrides would reject.
        text = argument if name != "model" or '"' in argument or "'" in argument else _quote_models(argument)
        value = parse_override(text).value()
        values[name] = tuple(map(str, value)) if is_list(value) else value
    try:
        config = ServeConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join([*problems, *map(_describe, error.errors())])) from error
    problems += _find_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _quote_models(argument: str) -> str:
    """Quote the entries of model=FOLDER or model=[A,B], so that they may contain an equals sign."""
    value = argument.removeprefix("model=")
    if value.startswith("[") and value.endswith("]"):
        return f"model=[{','.join(repr(entry.strip()) for entry in value[1:-1].split(','))}]"
    return f"model={value!r}"


def _describe(error: Any) -> str:
    name = ".".join(map(str, error["loc"][:1]))
    if error["type"] == "missing":
        return f"{name} is missing. Write {name}=FOLDER, for example {name}=models/tiny."
    return f"{name}={error['input']!r}: {error['msg']}. {ServeConfig.model_fields[name].description}"


def _find_problems(config: ServeConfig) -> list[str]:
    """Return what contradicts itself, or does not exist."""
    problems = list[str]()
    if config.host not in LOOPBACK and config.keys is None:
        problems.append(
            f"host={config.host} lets other machines connect, and the server's own key is for this machine only. Set "
            "keys=FILE with the keys of its users, or host=127.0.0.1 and an SSH tunnel"
        )
    if config.new_key is not None and config.keys is None:
        problems.append(f"new_key={config.new_key} has no file to add a key to. Set keys=FILE")
    if config.param_dtype not in ("auto", "float32", "bfloat16"):
        problems.append(f"param_dtype={config.param_dtype} is unknown. Set auto, float32 or bfloat16")
    for name, folder in config.base_models().items():
        if not Path(folder, "config.json").is_file() and not is_model_name(folder):
            problems.append(
                f"model: {folder} contains no config.json. Give a model folder" + _rename_hint(name, folder)
            )
    problems += _find_engine_problems(config)
    rollout_capabilities(config.rollout)  # raises ConfigError for an unknown name
    return problems


def _find_engine_problems(config: ServeConfig) -> list[str]:
    name = config.engine_name()
    capabilities = engine_capabilities(name)
    if config.nnodes > 1 and config.backend() != "ray":
        return [f"nnodes={config.nnodes} needs controller=ray. Omit controller"]
    if not (capabilities.supports_step_hyperparameters and capabilities.supports_target_log_probs):
        return [
            f"engine={name} does not support hyperparameters of a step, which each optim_step of a client sets, or "
            f"log-probs of any targets. Set engine={SINGLE_PROCESS_ENGINE}, or engine={SHARDED_ENGINE} for several "
            "ranks"
        ]
    if config.world_size > 1 and not capabilities.multiple_ranks:
        return [f"engine={name} trains on one rank, not on {config.world_size}. Set engine={SHARDED_ENGINE}"]
    try:
        ranks_per_row = capabilities.options.from_dict(config.engine_options(False)).ranks_per_row()
    except CamshaftError as error:
        return [f"engine_kwargs: {error}"]
    if config.world_size % ranks_per_row:
        return [
            f"{config.world_size} ranks are not divisible by the {ranks_per_row} ranks that process the same rows "
            "(engine_kwargs). Set another number of ranks"
        ]
    return []


def _rename_hint(name: str, folder: str) -> str:
    return "" if name != folder else ", or name=folder if clients ask for it under another name"
