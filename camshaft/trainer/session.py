"""What surrounds a run of either trainer: logging, seed, the place it runs in, its length, trackers.

with session(config.trainer) as run:
    total_steps = run_length(config.trainer, loader)
    with run.tracking(config, total_steps, saved) as tracking:
        stop = run.listen()
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import torch
from rich.console import Console
from rich.logging import RichHandler

from camshaft import storage
from camshaft.checkpoint import Saved
from camshaft.config import PPOConfig, SupervisedConfig, SupervisedTrainerConfig, without_secrets
from camshaft.config.schema.trainer import TrainerConfig
from camshaft.data import StatefulLoader
from camshaft.errors import CamshaftError, ConfigError
from camshaft.roles import ActorRolloutRefWorker, CriticWorker, SupervisedWorker
from camshaft.stop import Stop, listening
from camshaft.tracking import RunInfo, Tracking, check_trackers

logger = logging.getLogger(__name__)


class Session:
    """The screen and the trackers of one run."""

    def __init__(self, trainer: TrainerConfig | SupervisedTrainerConfig):
        self.trainer = trainer
        self.console = Console(highlight=False)
        self._until_end = contextlib.ExitStack()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def tracking(
        self, config: PPOConfig | SupervisedConfig, total_steps: int, saved: Saved | None, inside: str = ""
    ) -> Tracking:
        """The trackers; of a validation alone, which goes on from no metrics and replaces none, `inside` a folder."""
        trainer = self.trainer
        info = RunInfo(
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            folder=Path(trainer.default_local_dir) / inside,
            total_steps=total_steps,
            resumed_step=None if saved is None else saved.step,
            config=without_secrets(config),
        )
        return Tracking(trainer.logger, info)

    def listen(self) -> Stop:
        """From now on there is something to save: until the session ends a signal asks the run to stop."""
        return self._until_end.enter_context(listening())

    def close(self) -> None:
        self._until_end.close()


@contextlib.contextmanager
def session(trainer: TrainerConfig | SupervisedTrainerConfig, ranks: int | None = None) -> Iterator[Session]:
    """A run of so many processes in its folder, which no other run may write to at the same time."""
    _check_place(trainer, trainer.world_size if ranks is None else ranks)
    check_trackers(trainer.logger)
    lock = _locked(Path(trainer.default_local_dir).expanduser())
    run = Session(trainer)
    try:
        with logged(run.console, trainer.seed):
            yield run
    finally:
        run.close()
        lock.close()


@contextlib.contextmanager
def logged(console: Console, seed: int) -> Iterator[None]:
    """Log records go to the screen; the run's seed is set where a library draws without being told one."""
    handler = RichHandler(console=console, show_path=False, rich_tracebacks=False)
    root = logging.getLogger("camshaft")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _locked(folder: Path) -> IO[str]:
    lock = storage.hold(folder)
    if lock is None:
        raise ConfigError(
            f"trainer.default_local_dir={folder}: another run is writing there. Wait for it, or name another folder "
            "(trainer.experiment_name=...)"
        )
    return lock


def finish_saving(roles: Iterable[ActorRolloutRefWorker | CriticWorker | SupervisedWorker], failed: bool) -> None:
    """Wait for checkpoints that are written in the background; of a run that failed, as far as its workers live."""
    # The error of the run is the one to be read, and its workers may have ended with it.
    with contextlib.suppress(CamshaftError) if failed else contextlib.nullcontext():
        for role in roles:
            role.wait_for_checkpoint()


def run_length(trainer: TrainerConfig | SupervisedTrainerConfig, loader: StatefulLoader) -> int:
    """Steps of the run: as many as the config asks for, and no more than the data has."""
    asked, there = trainer.total_training_steps, len(loader)
    if asked is None or asked <= there:
        return asked or there
    logger.warning(
        "trainer.total_training_steps=%d: the data end after %d (trainer.total_epochs=%d of %d steps). For more steps "
        "raise trainer.total_epochs",
        *(asked, there, trainer.total_epochs, loader.steps_per_epoch),
    )
    return there


def _check_place(trainer: TrainerConfig | SupervisedTrainerConfig, ranks: int) -> None:
    """What only the machine can tell, before anything is loaded: is there such a device, can the run write?"""
    if trainer.backend() == "local":
        check_device(trainer.device, ranks)
    folder = Path(trainer.default_local_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"trainer.default_local_dir={trainer.default_local_dir}: the run cannot write there ({error.strerror}). "
            "Name another folder"
        ) from error


def check_device(device: str, ranks: int) -> None:
    """One device of this kind for each rank; all share the CPU."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(
            f"trainer.device={device}: this torch knows no such device. Type trainer.device=cpu"
        ) from error
    if kind == "cpu":
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != kind:
        raise ConfigError(f"trainer.device={device}: torch finds no such device here. Type trainer.device=cpu")
    if torch.accelerator.device_count() < ranks:
        raise ConfigError(
            f"trainer.n_gpus_per_node={ranks}: there are {torch.accelerator.device_count()} {kind} devices here, and "
            f"each rank needs one of its own. Type trainer.n_gpus_per_node={torch.accelerator.device_count()}"
        )
