"""Start a run from keys and Python objects.

    folder, launch = start("ppo", Objects(model, tokenizer, data, val_data, reward), keys, config)
    folder, launch = resume(folder, launch, changed)

The keys are composed and checked as those of the command line, and the run is the same function
(`trainer.loop.run`). Objects are first written to the run folder (`inputs.py`).
"""

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from camshaft.config import PPOConfig, SFTConfig, from_container
from camshaft.config.auto.rules import RULES
from camshaft.config.composition import as_override
from camshaft.config.defaults import raw_defaults
from camshaft.config.load import choose_automatic, resolve
from camshaft.config.run_folder import FOLDER, NAME, generated_name, number_run, numbered_folder
from camshaft.config.schema.fields import AUTO, Section
from camshaft.config.schema.supervised import RMConfig
from camshaft.config.short_names import REWARD_FUNCTIONS, REWARD_NAME, REWARD_PATH, expand_short_names, short_names
from camshaft.config.tree import expand_keys, flatten, get, leaf_fields
from camshaft.errors import ConfigError
from camshaft.machine import detect_machine
from camshaft.runs.inputs import FOLDER as INPUTS
from camshaft.runs.inputs import is_path, plain, save_model, save_rows, save_tokenizer
from camshaft.runs.launch import PYTHON, Launch, as_hooks
from camshaft.stop import ENDED_BY_SIGNAL
from camshaft.tracking.base import Command
from camshaft.tracking.run_folder import RunFolder

Config = PPOConfig | SFTConfig | RMConfig
SCHEMAS: dict[Command, type[Config]] = {"ppo": PPOConfig, "sft": SFTConfig, "rm": RMConfig}

REWARD_KEYS = (REWARD_PATH, REWARD_NAME, REWARD_FUNCTIONS)
"""Keys that name the reward function."""
_TOKENIZER = "data.tokenizer"


class Objects(NamedTuple):
    """Arguments that are paths or Python objects."""

    model: Any
    tokenizer: Any
    data: Any
    val_data: Any
    reward: Any = None
    on_step: Callable[..., Any] | Sequence[Callable[..., Any]] = ()
    environment: Any = None
    agent: Any = None
    tools: Any = None


SAVED = ("model", "data", "val_data")
"""Objects that are written to the run folder, besides the tokenizer of a model."""
FUNCTIONS = ("reward", "environment", "agent", "tools")
"""Objects that the launch of a run holds, besides its hooks."""


def start(
    command: Command, objects: Objects, keys: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> tuple[Path, Launch]:
    """Train, and return the run folder and the launch. `keys` and `config` contain short names and config keys."""
    values = _values(command, objects, keys, config or {})
    functions = {name: _function(getattr(objects, name)) for name in FUNCTIONS}
    launch = Launch(command, values, on_step=as_hooks(objects.on_step), **functions)
    with _written_objects(launch, objects) as (folder, launch):
        parsed = number_run(_parse(launch))
    folder = folder or Path(parsed.trainer.default_local_dir)
    if isinstance(parsed, PPOConfig) and parsed.trainer.val_only:
        folder /= "validation"  # a validation does not replace the metrics of the training
    _train(parsed, launch, folder)
    return folder, launch


def resume(folder: Path, launch: Launch, changed: Launch) -> tuple[Path, Launch]:
    """Continue the run in `folder`, which `launch` has started, with the values and objects of `changed`."""
    given = {name: value for name in FUNCTIONS if (value := getattr(changed, name)) is not None}
    values = {key: value for key, value in launch.values.items() if "reward" not in given or key not in REWARD_KEYS}
    new_values = {**changed.values, **{name: value for name, value in given.items() if is_path(value)}}
    values |= flat_values(plain(new_values), SCHEMAS[launch.command]) | {FOLDER: str(folder)}
    functions = {name: _function(value) for name, value in given.items()}
    launch = replace(launch, values=values, on_step=changed.on_step or launch.on_step, **functions)
    _train(_parse(launch), launch, folder)
    return folder, launch


def recorded_values(command: Command, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recorded config that differ from the defaults.

    A value that is chosen automatically, or that the default derives from other keys, such as `${trainer.seed}`, is
    compared with the value that it would have, given the other keys.
    """
    from camshaft.trainer.resume import RESUME_KEYS, config_record

    schema = SCHEMAS[command]
    leaves, model = leaf_fields(schema), short_names(schema)["model"]

    def record(values: Mapping[str, Any]) -> dict[str, Any]:
        tree, _ = choose_automatic(expand_keys(values, leaves), schema, detect_machine())
        return config_record(schema.model_validate(resolve(tree, schema)[0]))

    config = flatten(expand_keys(config, leaves), leaves)
    raw = flatten(raw_defaults(schema), leaves)
    chosen = [key for key in RULES[schema] if raw[key] == AUTO]
    derived = [*chosen, *(key for key, value in raw.items() if "${" in str(value) and key != FOLDER)]
    values, defaults = {model: config[model]}, record({model: config[model]})
    others = config.keys() - {*derived, *RESUME_KEYS}
    values |= {key: config[key] for key in config if key in others and defaults.get(key) != config[key]}
    current = record(values)
    for key in derived:
        if key in config and current.get(key) != config[key]:
            values[key] = config[key]
            current = record(values)
    return values


def _function(value: Any) -> Any:
    """Return the Python objects of a `reward`, `environment`, `agent` or `tools`, or None if it is a path."""
    return None if value is None or is_path(value) else value


# -- keys and objects -----------------------------------------------------------------------------


def _values(command: Command, objects: Objects, keys: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by config key. Short names are replaced; objects are not included."""
    schema = SCHEMAS[command]
    twice = sorted(keys.keys() & config.keys())
    if twice:
        raise ConfigError(f"{', '.join(twice)}: set both as an argument and in config; remove one of them")
    function = next((name for name, value in {**config, **keys}.items() if callable(value)), None)
    if function is not None:
        raise ConfigError(
            f"{function} is a Python object; pass a name, or 'module:function' for a function in a file that Python "
            "can import"
        )
    given = {name: value for name in (*SAVED, *FUNCTIONS) if is_path(value := getattr(objects, name))}
    values = flat_values({**plain(config), **plain(keys), **plain(given)}, schema)
    if is_path(objects.tokenizer) and is_path(objects.model):
        values |= _tokenizer_key(command, plain(objects.tokenizer))
    if FOLDER in values and values[FOLDER] is None:  # out=None, as without the argument
        del values[FOLDER]
    if objects.val_data is None and "data.val_files" not in values:
        values["data.val_files"] = None
    return values


def flat_values(values: Mapping[str, Any], schema: type[Section]) -> dict[str, Any]:
    """Return the values of short names, dotted keys and nested sections by config key, without validating them."""
    leaves = leaf_fields(schema)
    return flatten(expand_keys(expand_short_names(values, schema), leaves), leaves)


def _run_folder(values: Mapping[str, Any], schema: type[Section]) -> Path:
    """Return the folder of a run with these values, as the config determines it, without validating them."""
    named = dict(values) if values.get(NAME) is not None else {**values, NAME: "*"}
    resolved, _ = resolve(expand_keys(named, leaf_fields(schema)), schema)
    folder, names = str(get(resolved, FOLDER)), short_names(schema)
    if "*" in folder:
        folder = folder.replace("*", generated_name(str(values[names["model"]])))
    return Path(folder).expanduser()


def _tokenizer_key(command: Command, path: str) -> dict[str, Any]:
    if command != "ppo":
        raise ConfigError("tokenizer requires a model that is an object; save the tokenizer to the folder of the model")
    return {_TOKENIZER: path}


@contextlib.contextmanager
def _written_objects(launch: Launch, objects: Objects) -> Iterator[tuple[Path | None, Launch]]:
    """Write the objects to the run folder. Yield this folder, or None without objects, and the launch with their paths.

    An error removes what this function has written, but nothing that another run has written to the folder meanwhile.
    """
    schema = SCHEMAS[launch.command]
    names = short_names(schema)
    given = {name: getattr(objects, name) for name in (*SAVED, "tokenizer")}
    unsaved = {name for name, value in given.items() if value is not None and not is_path(value)}
    if not unsaved:
        yield None, launch
        return
    placeholders = {names[name]: _name(given[name]) for name in unsaved & {*names}}
    wanted = _run_folder({**placeholders, **launch.values}, schema)
    missing = [path for path in (wanted / INPUTS, wanted, *wanted.parents) if not path.exists()]
    folder = numbered_folder(wanted)
    new_folders = [folder / path.relative_to(wanted) if path.is_relative_to(wanted) else path for path in missing]
    existing = set(folder.glob(f"{INPUTS}/*"))
    values = {**launch.values, FOLDER: str(folder)}
    try:
        for name, rows in {"data": objects.data, "val_data": objects.val_data}.items():
            if name in unsaved:
                values[names[name]] = save_rows(rows, folder, name)
        if "model" in unsaved:
            values[names["model"]] = save_model(objects.model, objects.tokenizer, folder)
        elif "tokenizer" in unsaved:
            values |= _tokenizer_key(launch.command, save_tokenizer(objects.tokenizer, folder))
        yield folder, replace(launch, values=values)
    except BaseException:
        keys = [*(names[name] for name in unsaved & {*names}), _TOKENIZER]
        for path in {Path(str(values[key])) for key in keys if key in values} - existing:
            if path.parent == folder / INPUTS:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            for empty in new_folders:
                empty.rmdir()
        raise


def _name(value: Any) -> str:
    """Return a name of an object for the name of the run."""
    path = getattr(value, "name_or_path", None)
    return path if isinstance(path, str) and path else type(value).__name__.lower()


def _parse(launch: Launch) -> Config:
    """Return the validated config. Raise ConfigError with all problems."""
    values = _with_function(launch)
    if launch.command == "ppo":
        return from_container(values, PPOConfig)
    return from_container(values, SFTConfig) if launch.command == "sft" else from_container(values, RMConfig)


def _with_function(launch: Launch) -> dict[str, Any]:
    """Return the values with the names of reward function, environments and program, if they are Python objects."""
    values = dict(launch.values)
    if launch.environment is not None:
        from camshaft.agents.callables import environment_names

        names = environment_names(launch.environment)
        values |= flat_values({"environment": [f"{PYTHON}{name}" for name in names]}, SCHEMAS[launch.command])
    if launch.agent is not None:
        from camshaft.agents.callables import agent_name

        values |= flat_values({"agent": f"{PYTHON}{agent_name(launch.agent)}"}, SCHEMAS[launch.command])
    if launch.tools is not None:
        from camshaft.agents.callables import named_tools

        names = list(named_tools(launch.tools))
        values |= flat_values({"tools": [f"{PYTHON}{name}" for name in names]}, SCHEMAS[launch.command])
    if launch.reward is None:
        return values
    set_keys = [key for key in REWARD_KEYS if launch.values.get(key)]
    if set_keys:
        raise ConfigError(f"{set_keys[0]} is set, but reward is a Python function; remove one of them")
    from camshaft.rewards.callables import reward_name

    return {**values, REWARD_PATH: None, REWARD_NAME: f"{PYTHON}{reward_name(launch.reward)}"}


# -- training -------------------------------------------------------------------------------------


def _train(config: Config, launch: Launch, folder: Path) -> None:
    """Train. Ctrl-C ends the training, and another stop signal also ends this process."""
    earlier = _start_time(folder)
    try:
        status = _status(config, launch)
    except KeyboardInterrupt:
        if _start_time(folder) == earlier:  # interrupted before the first step
            raise
        status = ENDED_BY_SIGNAL + signal.SIGINT
    if status > ENDED_BY_SIGNAL and status != ENDED_BY_SIGNAL + signal.SIGINT:
        signal.raise_signal(status - ENDED_BY_SIGNAL)  # delayed until the checkpoint was saved


def _start_time(folder: Path) -> Any:
    """Return the time at which the last run in a folder started, or None."""
    return RunFolder(folder).info().get("started") if folder.expanduser().is_dir() else None


def _status(config: Config, launch: Launch) -> int:
    """Run the trainer of a config, and return the exit status."""
    from camshaft.planning.micro_batches import fit_micro_batches, limits_as_overrides
    from camshaft.trainer.loop import run
    from camshaft.trainer.session import Extensions

    config = fit_micro_batches(config)
    if isinstance(config, PPOConfig):
        from camshaft.agents.callables import pickle_agent, pickle_environments, pickle_tools
        from camshaft.planning.memory_error import explain_memory_errors
        from camshaft.rewards.callables import pickle_reward
        from camshaft.trainer import ppo_trainer

        reward = () if launch.reward is None else pickle_reward(launch.reward)
        environments = () if launch.environment is None else pickle_environments(launch.environment)
        environments += () if launch.agent is None else pickle_agent(launch.agent)
        environments += () if launch.tools is None else pickle_tools(launch.tools)
        if config.trainer.max_restarts:
            raise ConfigError(
                "a run from Python has no command that could run again, as trainer.max_restarts requires; call "
                "load_run(folder).resume() after a failure, or use `camshaft ppo`"
            )
        arguments = [as_override(key, value) for key, value in _with_function(launch).items()]
        arguments += limits_as_overrides(config)
        with explain_memory_errors(config, arguments):
            extensions = Extensions(reward, environments, launch.on_step, from_python=True)
            return run(config, ppo_trainer(config).open, extensions)
    from camshaft.trainer.supervised import RMTrainer, SFTTrainer

    extensions = Extensions(on_step=launch.on_step, from_python=True)
    if isinstance(config, SFTConfig):
        return run(config, SFTTrainer, extensions)
    return run(config, RMTrainer, extensions)
