"""Setup shared by all trainers: logging, seeding, output folder, run length, trackers, hooks.

with session(config.trainer) as run:
    total_steps = run_length(config.trainer, loader)
    with run.tracking(config, total_steps, saved) as tracking:
        stop = run.listen()
"""

import contextlib
import inspect
import itertools
import logging
import numbers
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from camshaft import storage
from camshaft.agents.messages import Source
from camshaft.checkpoint import SavedCheckpoint
from camshaft.checkpoint.manager import LATEST
from camshaft.config import (
    PPOConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
    SupervisedTrainerConfig,
    resume_arguments,
    run_name,
    without_secrets,
)
from camshaft.config.auto.fitting import PromptsConfig, fit_to_prompts
from camshaft.config.auto.rules import PROMPTS
from camshaft.config.checks import check_lengths
from camshaft.config.errors import format_problems
from camshaft.config.schema.reward import split_function
from camshaft.config.schema.trainer import HOOKS_KEY, TrainerConfig
from camshaft.config.tree import shorten
from camshaft.controller.placement import check_device
from camshaft.data import StatefulLoader
from camshaft.dataproto import DataProto
from camshaft.errors import ConfigError
from camshaft.machine import CPU, describe_contention
from camshaft.masking import printable
from camshaft.models.loader import load_tokenizer
from camshaft.plugins import find_in_file, import_attribute
from camshaft.rewards.callables import name_of
from camshaft.rewards.manager import FAILED_REWARDS
from camshaft.rewards.messages import FunctionSpec
from camshaft.stop import Stop, handle_stop_signals
from camshaft.subprocesses import extend_import_path, open_closed_streams
from camshaft.temporary import remove_leftovers
from camshaft.tracking import RunInfo, Tracking, check_trackers
from camshaft.tracking.base import Command
from camshaft.tracking.console import shared_console
from camshaft.tracking.jsonl import FILE_NAME
from camshaft.tracking.record import RECORD, check_folder, log_text, log_to_file, record_failed_start
from camshaft.tracking.terminal import continue_without_reader, log_to_console
from camshaft.trainer.resume import recorded_steps, resumed_values

COMMANDS: Mapping[type[PPOConfig | SupervisedConfig], Command] = {PPOConfig: "ppo", SFTConfig: "sft", RMConfig: "rm"}
"""Command of each kind of run."""

logger = logging.getLogger(__name__)


class Session:
    """Console, trackers and signal handlers of a run."""

    def __init__(self, trainer: TrainerConfig | SupervisedTrainerConfig, from_python: bool = False):
        self.trainer, self.from_python = trainer, from_python
        self.console = shared_console()
        self.has_started = False
        """True once the run has state to save."""
        self.exit_stack = contextlib.ExitStack()

    def say(self, text: str) -> None:
        """Print a message, and write it to the log of the run."""
        log_text(text)
        self.console.print(printable(text), markup=False, soft_wrap=True)

    def say_how_to_resume(self) -> None:
        """Print how to resume a run that has stopped or failed, if it has saved a checkpoint."""
        if (Path(self.trainer.default_local_dir).expanduser() / LATEST).exists():
            arguments = resume_arguments(self.trainer)
            if self.from_python:
                self.say(f"Call camshaft.load_run({self.trainer.default_local_dir!r}).resume() to resume.")
            else:
                self.say(f"Run the same command{' with ' if arguments else ''}{arguments} to resume.")

    def say_results(self, total_steps: int, steps_per_epoch: int, model: str | None = None) -> None:
        """Print where the results of a finished run are, and what to do with them."""
        trainer, folder = self.trainer, Path(self.trainer.default_local_dir)
        places = {"metrics": folder / FILE_NAME, "model": model, "checkpoints": folder}
        if isinstance(trainer, TrainerConfig):
            places["validation"] = trainer.validation_data_dir or folder / "validation"
            places["responses"] = trainer.rollout_data_dir
            places["failed rewards"] = folder / FAILED_REWARDS
        has_checkpoint = (folder.expanduser() / LATEST).exists()
        if not has_checkpoint:
            del places["checkpoints"]
        lines = {name: str(path) for name, path in places.items() if path and Path(path).expanduser().exists()}
        target = _unused(Path("models") / Path(run_name(trainer)).name)
        if has_checkpoint and self.from_python:
            if model is None:
                lines["export"] = f"run.export({str(target)!r})"
            lines["train longer"] = f"run.resume({', '.join(self._twice_as_long(total_steps, steps_per_epoch))})"
        elif has_checkpoint:
            if model is None:
                lines["export"] = f"camshaft export {shlex.quote(str(folder))} {shlex.quote(str(target))}"
            longer = " ".join(self._twice_as_long(total_steps, steps_per_epoch))
            place = "" if trainer.experiment_name else f"out={shlex.quote(str(folder))} "
            lines["train longer"] = f"the same command with {place}{longer}"
        self.say("\n".join(f"{name:<14} {text}" for name, text in lines.items()))

    def _twice_as_long(self, total_steps: int, steps_per_epoch: int) -> Iterator[str]:
        """Yield the values of the keys that limit the run, for twice as many steps."""
        by_steps = self.trainer.total_training_steps == total_steps
        if by_steps:
            yield f"steps={2 * total_steps}"
        epochs = self.trainer.total_epochs
        if epochs is not None and (not by_steps or epochs * steps_per_epoch < 2 * total_steps):
            yield f"epochs={2 * epochs}"

    def tracking(
        self, config: PPOConfig | SupervisedConfig, total_steps: int, saved: SavedCheckpoint | None, subfolder: str = ""
    ) -> Tracking:
        """Build the trackers. Validation-only runs set `subfolder` to keep the metrics of the training run."""
        trainer = self.trainer
        info = RunInfo(
            project=trainer.project_name,
            experiment=run_name(trainer),
            folder=Path(trainer.default_local_dir) / subfolder,
            total_steps=total_steps,
            resumed_step=None if saved is None else saved.step,
            config=without_secrets(config),
            command=COMMANDS[type(config)],
            recorded_steps=recorded_steps(saved, trainer.default_local_dir)["metrics"],
        )
        return Tracking([*trainer.logger, RECORD], info)

    def listen(self, stop: Stop | None = None, ctrl_c: bool = False) -> Stop:
        """Handle stop signals until the session ends. Call this when the run has state to save."""
        self.has_started = True
        return self.exit_stack.enter_context(handle_stop_signals(stop, ctrl_c))


@contextlib.contextmanager
def session(
    trainer: TrainerConfig | SupervisedTrainerConfig, ranks: int | None = None, from_python: bool = False
) -> Iterator[Session]:
    """Check the machine, lock the output folder and set up logging for a run of `ranks` processes."""
    open_closed_streams()
    ranks = trainer.world_size if ranks is None else ranks
    _check_machine(trainer, ranks)
    check_trackers(trainer.logger)
    folder = Path(trainer.default_local_dir).expanduser()
    lock = storage.lock_folder(folder)
    if lock is None:
        raise ConfigError(
            f"trainer.default_local_dir={folder}: another run is writing to this folder; wait for it, or use another "
            "folder (trainer.experiment_name=...)"
        )
    check_folder(folder)
    run = Session(trainer, from_python)
    with lock, run.exit_stack:
        streams = continue_without_reader(folder / "logs" / "driver.log")
        with streams, log_to_file(folder), log_to_console(run.console, trainer.seed):
            run.say(f"run folder: {trainer.default_local_dir}")
            remove_leftovers()
            if trainer.device == CPU and (problem := describe_contention(ranks)):
                logger.warning("%s; %s", *problem)
            try:
                yield run
            except BaseException as error:
                if run.has_started and (from_python or resume_arguments(trainer)):
                    run.say_how_to_resume()
                elif not run.has_started and isinstance(error, Exception):
                    record_failed_start(folder, error)
                raise


def _unused(folder: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, ... if it exists."""
    others = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    names = itertools.chain([folder], others)
    return next(path for path in names if not path.exists())


def run_tokenizer(path: str, trust_remote_code: bool, chat_template: str | None, folder: str) -> Any:
    """Load the tokenizer of a run.

    With a chat template of its own, it is also written to `folder`, the run folder, as the tokenizer of exported
    models.
    """
    tokenizer = load_tokenizer(path, trust_remote_code, chat_template)
    if chat_template is not None:
        target = Path(folder).expanduser().absolute() / "tokenizer"
        storage.check_replaceable(target, "tokenizer")
        with storage.new_folder(target, kind="tokenizer") as work:
            tokenizer.save_pretrained(work)
        tokenizer.name_or_path = str(target)
    return tokenizer


def fit_prompts(config: PromptsConfig, data: Sequence[DataProto], num_tool_tokens: int = 0) -> PromptsConfig:
    """Return the config with the length of the longest prompt as maximum, if none was set.

    `num_tool_tokens` is the number of tokens with which the chat template describes the tools of an environment. A run
    that resumes keeps its maximum, unless a prompt is longer.
    """
    longest = max((int(prompts["prompts"].lengths.max()) for prompts in data if len(prompts)), default=1)
    longest += num_tool_tokens
    previous = resumed_values(config).get(PROMPTS) if isinstance(config, PPOConfig) else None
    fitted = fit_to_prompts(config, longest, previous if isinstance(previous, int) else 0)
    problems = list(check_lengths(fitted)) if fitted is not config else []
    if problems:
        raise ConfigError(format_problems(problems))
    return fitted


def run_length(trainer: TrainerConfig | SupervisedTrainerConfig, loader: StatefulLoader) -> int:
    """Return the number of steps, which is `total_training_steps` or the length of the data, if that is less."""
    configured = trainer.total_training_steps
    if trainer.total_epochs is None and configured is not None:
        return configured
    available = len(loader)
    if configured is None or configured <= available:
        return configured or available
    logger.warning(
        "trainer.total_training_steps=%d: the data has only %d steps (trainer.total_epochs=%d with %d steps each); "
        "increase or omit trainer.total_epochs to train for more steps",
        *(configured, available, trainer.total_epochs, loader.steps_per_epoch),
    )
    return available


def _check_machine(trainer: TrainerConfig | SupervisedTrainerConfig, ranks: int) -> None:
    """Check that the devices exist and that the output folder is writable, before anything is loaded."""
    if trainer.backend() == "local":
        check_device(trainer.device, ranks)
    folder = Path(trainer.default_local_dir).expanduser()
    try:
        storage.make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"trainer.default_local_dir={trainer.default_local_dir} is not writable ({error.strerror}); use another "
            "folder"
        ) from error


# -- Python objects of a run ----------------------------------------------------------------------

StepHook = Callable[[int, DataProto, dict[str, float]], Mapping[str, float] | None]
"""Called on the driver after each step, with the step, its batch and its metrics. It may return further metrics."""


@dataclass(frozen=True)
class Extensions:
    """Python objects of a run, and settings that apply only to runs from Python."""

    reward: tuple[FunctionSpec, ...] = ()
    environments: tuple[Source, ...] = ()
    """Reward functions, instead of those that the config names."""
    on_step: tuple[StepHook, ...] = ()
    """Hooks that are called after each step."""
    from_python: bool = False
    """Finish the step and save a checkpoint on Ctrl-C, as on SIGTERM, and suggest calls of `Run` at the end."""
    stop: Stop | None = None
    """Receives the stop requests of a PPO run, if the caller needs them."""


def with_hooks(names: Sequence[str], extensions: Extensions | None) -> Extensions:
    """Return the extensions of a run with the hooks that `trainer.on_step` names, which are called first."""
    extensions = extensions or Extensions()
    return replace(extensions, on_step=(*map(load_hook, names), *extensions.on_step))


def load_hook(text: str) -> StepHook:
    """Load the function that `file.py:function` or `module:function` names. A file may import modules beside it."""
    path, name = split_function(text)
    hook: StepHook
    if path is None:
        hook = import_attribute(name or text)
    else:
        extend_import_path([str(Path(path).resolve().parent)])
        hook = find_in_file(path, name or "", "hook", HOOKS_KEY)
    if not callable(hook):
        raise ConfigError(f"the hook {text} has type {type(hook).__name__}; set a function")
    try:
        inspect.signature(hook).bind(1, DataProto(), {})
    except TypeError as error:
        raise ConfigError(
            f"the hook {text} cannot be called: {error}; a hook has the parameters step, batch and metrics"
        ) from error
    return hook


def call_hooks(hooks: Sequence[StepHook], step: int, batch: DataProto, metrics: dict[str, float]) -> dict[str, float]:
    """Call the hooks in order, and return the metrics with those that the hooks return."""
    for hook in hooks:
        added = hook(step, batch, dict(metrics))
        if added is None:
            continue
        if not isinstance(added, Mapping) or not all(_is_metric(*item) for item in added.items()):
            raise _wrong_result(hook, added)
        metrics = metrics | {name: float(value) for name, value in added.items()}
    return metrics


def _wrong_result(hook: StepHook, result: object) -> ConfigError:
    name = name_of(hook, "")
    return ConfigError(
        f"on_step: the hook{name and f' {name}'} returned {shorten(repr(result))}; return None, or a dict that maps "
        "names of metrics to numbers"
    )


def _is_metric(name: object, value: object) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return isinstance(name, str) and (isinstance(value, numbers.Real) or is_scalar)
