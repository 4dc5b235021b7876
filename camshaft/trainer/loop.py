"""The training loop: prepare or resume, train, validate, log, save, stop. A trainer adds its step.

    with PPOTrainer.open(config) as trainer, Tracking(...) as tracking:
        trainer.prepare()
        trainer.fit(tracking)

    status = run(config, PPOTrainer.open)        # also sets up session and trackers

An iteration is `collect`, which turns what the source yields into a batch, and `step`, which learns from the batch.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from camshaft.checkpoint import BestStep, CheckpointManager, SavedCheckpoint
from camshaft.config import PPOConfig, SupervisedConfig
from camshaft.config.auto.table import format_choices
from camshaft.config.checks.backends import check_libraries
from camshaft.config.run_folder import number_run
from camshaft.controller import Worker
from camshaft.controller.placement import pool_specs
from camshaft.dataproto import DataProto
from camshaft.errors import CamshaftError, ScoringAbandoned
from camshaft.garbage import frozen_objects
from camshaft.roles import ActorRolloutRefWorker
from camshaft.roles.base import TrainedRole
from camshaft.stop import Stop
from camshaft.tracking import Tracking
from camshaft.tracking.durable import Ranges, RunFiles
from camshaft.tracking.record import RunStatus
from camshaft.trainer.divergence import DivergenceCheck
from camshaft.trainer.metrics import RankTimes, StepMetrics
from camshaft.trainer.resume import check_resume, config_record, log_resume
from camshaft.trainer.schedule import SAVE_INTERVAL, Schedule
from camshaft.trainer.session import Extensions, StepHook, call_hooks, session, with_hooks

C = TypeVar("C", bound=PPOConfig | SupervisedConfig)
T = TypeVar("T")
"""Type of the inputs that the source yields."""
T_co = TypeVar("T_co", covariant=True)
B = TypeVar("B")
"""Type of the batch that `collect` returns and `step` learns from."""

logger = logging.getLogger(__name__)


class Source(Protocol[T_co]):
    """Iterator over the inputs of the steps, with a position that checkpoints contain, such as `StatefulLoader`."""

    @property
    def exhausted(self) -> bool:
        """True after the last item."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    def __iter__(self) -> Iterator[T_co]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TrainingLoop(ABC, Generic[C, T, B]):
    """A run that trains roles, one batch after another. On exit of its `with` block, all checkpoints are written."""

    metric_prefix: ClassVar[str | None] = None
    """Prefix of the metrics of the trained roles; None stands for the name of each role."""

    def __init__(
        self,
        config: C,
        source: Source[T],
        total_steps: int,
        trained: Mapping[str, ActorRolloutRefWorker | TrainedRole],
        status: RunStatus,
        checksums: Mapping[str, str],
        stop: Stop | None = None,
    ):
        """`trained` are the roles that checkpoints contain, and `checksums` those of `input_checksums`."""
        trainer = config.trainer
        self.config, self.source, self.total_steps, self.trained = config, source, total_steps, trained
        self.status, self.input_checksums, self.stop = status, checksums, stop or Stop()
        self.checkpoints = CheckpointManager(
            trainer.default_local_dir, trainer.default_hdfs_dir, trainer.worker_limit("save")
        )
        self.files = RunFiles(trainer.default_local_dir)
        self.best = BestStep(trainer.best_metric, trainer.best_metric_mode)
        self.divergence = DivergenceCheck(trained, trainer.max_skipped_steps, self.metric_prefix)
        self.on_step: Sequence[StepHook] = ()
        """Hooks that are called after each step, and may add metrics."""
        self.validates_first = self.only_validates = False
        """Whether the run validates before its first step, and whether it does nothing else."""
        self.global_step = 0
        self.batch = DataProto()
        """Rows of the last step, which `step` sets for the hooks and `after_step`."""
        self.is_over = False
        """True if the last step ends the run, which `after_step` may set."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish_saving(failed=kind is not None)

    # -- what a trainer defines -------------------------------------------------------------------

    @abstractmethod
    def init_models(self) -> None:
        """Build the models of all roles."""

    @abstractmethod
    def collect(self, inputs: T, metrics: StepMetrics) -> B:
        """Return the batch to learn from: what the source yielded, or responses to it."""

    @abstractmethod
    def step(self, batch: B, metrics: StepMetrics) -> dict[str, float]:
        """Learn from a batch, and return the metrics of the iteration."""

    @abstractmethod
    def validate(self, tracking: Tracking) -> dict[str, float]:
        """Return metrics of held-out rows."""

    @abstractmethod
    def keep(self) -> dict[str, int | None]:
        """Return the number of checkpoints to keep of each role; None keeps all."""

    @abstractmethod
    def exports(self) -> dict[str, Callable[[str, str | None], None]]:
        """Return the functions that write the Hugging Face folders of roles with every checkpoint."""

    # -- what a trainer may define ----------------------------------------------------------------

    def roles(self) -> Sequence[Worker]:
        """Return all roles of the run, whose ranks are timed."""
        return list(self.trained.values())

    def introduction(self) -> Iterator[str]:
        """Yield texts to print before the models are built."""
        if choices := format_choices(self.config):
            yield choices

    def checkpoint_to_resume(self) -> SavedCheckpoint | None:
        return self.checkpoints.latest() if self.config.trainer.resume_mode == "auto" else None

    def state(self) -> dict[str, Any]:
        """Return the state that checkpoints contain besides that of the loop."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned from the state of a checkpoint."""

    def recorded(self) -> dict[str, Ranges]:
        """Flush the files of the run to the disk, and return the steps that they contain."""
        return {"metrics": self.files.flush()}

    def after_step(self, metrics: dict[str, float]) -> None:
        """Add metrics of the whole iteration, and write what the step leaves behind."""

    def log_samples(self, tracking: Tracking) -> None:
        """Send rows of the step to the trackers, before its metrics."""

    def finish(self) -> None:
        """Write the results of a run that reached its end."""

    def export_path(self) -> str | None:
        """Return the folder to which `finish` exports the model."""
        return None

    # -- the loop ---------------------------------------------------------------------------------

    def prepare(self) -> SavedCheckpoint | None:
        """Build the models. If the run resumes from a checkpoint, load and return it."""
        self.status.enter("load")
        saved = self.checkpoint_to_resume()
        if saved is not None:
            check_resume(saved, self.config, self.trained, self.input_checksums)
        self.init_models()
        if saved is not None:
            for name, role in self.trained.items():
                role.load_checkpoint(saved.role(name))
            self.source.load_state_dict(saved.state["loader"])
            self.best.load_state_dict(saved.state["best"])
            self.load_state(saved.state)
            self.global_step = saved.step
            if not self.only_validates:
                log_resume(saved, self.total_steps)
        if self.config.trainer.resume_mode != "auto" and not self.only_validates:
            self.checkpoints.move_aside(after=self.global_step)
        return saved

    def fit(self, tracking: Tracking) -> dict[str, float]:
        """Train until the last step or a stop signal, or only validate. Return the last metrics.

        If the scoring of a step does not end in time after a stop signal, the step is abandoned.
        """
        trainer, total, stop = self.config.trainer, self.total_steps, self.stop
        saves, tests = Schedule(trainer.save_freq, SAVE_INTERVAL), Schedule(trainer.test_freq)
        metrics: dict[str, float] = {}
        if self.only_validates or (self.validates_first and self.global_step == 0):
            metrics, is_validated = self._validate_first(tracking, tests)
            if not is_validated:
                stop.acknowledge(self.global_step, total)
            if self.only_validates or not is_validated:
                return metrics
        saved_step, is_good, should_save = self.global_step, True, False
        position, times = self.source.state_dict(), RankTimes(self.roles())
        for inputs in self.source:
            if self.global_step >= total or self.is_over:
                break
            self.global_step += 1
            self.status.step = self.global_step
            collector = StepMetrics(self.status)
            try:
                metrics = self.step(self.collect(inputs, collector), collector)
            except ScoringAbandoned as error:
                logger.warning("abandoned step %d: %s", self.global_step, error)
                self.global_step -= 1
                self.source.load_state_dict(position)
                if self.global_step > saved_step:
                    self.save(prune=is_good)
                stop.acknowledge(self.global_step, total)
                return metrics
            metrics |= times.metrics()
            metrics = call_hooks(self.on_step, self.global_step, self.batch, metrics)
            self.after_step(metrics)
            self.batch, is_validated = DataProto(), True
            is_last = self.global_step == total or self.source.exhausted or self.is_over
            should_save = should_save or self.is_over or saves.is_due(self.global_step, is_last)
            if tests.is_due(self.global_step, is_last):
                val_metrics = self._validate_step(tracking, tests, metrics)
                is_validated = val_metrics is not None
                if val_metrics is not None:
                    should_save = self.best.update(val_metrics, self.global_step) or should_save
                    metrics |= val_metrics
            self.log_samples(tracking)
            tracking.log(metrics, step=self.global_step)
            is_good = self.divergence.check_updates(self.global_step, metrics)
            is_stopped = stop.requested is not None and not (is_last and is_validated)
            if is_stopped or (should_save and (is_good or is_last)):
                with saves.measure():
                    self.save(prune=is_good)
                saved_step, should_save = self.global_step, False
            elif should_save:
                self.divergence.check_outputs(self.global_step)
            if is_stopped:
                stop.acknowledge(self.global_step, total)
                return metrics
            position = self.source.state_dict()
        self.finish()
        return metrics

    def _validate_first(self, tracking: Tracking, tests: Schedule) -> tuple[dict[str, float], bool]:
        """Validate before the first step. Return the metrics, and False if a stop signal ended the validation."""
        self.status.enter("validate")
        try:
            with tests.measure():
                metrics = self.validate(tracking)
        except ScoringAbandoned as error:
            logger.warning("abandoned the validation before step %d: %s", self.global_step + 1, error)
            return {}, False
        tracking.log(metrics, step=self.global_step)
        if not self.only_validates:
            self.best.update(metrics, step=0)
        return metrics, True

    def _validate_step(self, tracking: Tracking, tests: Schedule, metrics: dict[str, float]) -> dict[str, float] | None:
        """Validate after a step. Return the metrics, or None if a stop signal ended the validation.

        If the validation fails, log `metrics`, those of the step, first.
        """
        self.status.enter("validate")
        try:
            with tests.measure():
                self.divergence.check_outputs(self.global_step)
                return self.validate(tracking)
        except ScoringAbandoned as error:
            logger.warning("abandoned the validation after step %d: %s", self.global_step, error)
            return None
        except CamshaftError:
            tracking.log(metrics, step=self.global_step)
            raise

    def save(self, prune: bool = True) -> None:
        """Save the state of the run as an atomic checkpoint, unless a model has diverged, and prune old checkpoints.

        The files of the steps up to this one are flushed to the disk before.
        """
        step = self.global_step
        self.status.enter("save")
        self.divergence.check_outputs(step)
        roles = {name: partial(role.save_checkpoint, global_step=step) for name, role in self.trained.items()}
        state = {
            "loader": self.source.state_dict(),
            "best": self.best.state_dict(),
            "config": config_record(self.config),
            "inputs": self.input_checksums,
            "recorded": self.recorded(),
            **self.state(),
        }
        self.checkpoints.save(step, roles, state, self.keep() if prune else {}, self.exports(), self.best.step)

    def finish_saving(self, failed: bool = False) -> None:
        """Wait for checkpoints that are being written in the background, and complete the last one."""
        for finish in (*(role.wait_for_checkpoint for role in self.trained.values()), self.checkpoints.bind):
            # If the run failed, that error is reported, and errors of workers that ended because of it are suppressed.
            with contextlib.suppress(CamshaftError, OSError) if failed else contextlib.nullcontext():
                finish()


Opened = Callable[[C, Extensions], contextlib.AbstractContextManager[TrainingLoop[C, Any, Any]]]
"""Builds the trainer of a run for a `with` block."""


def run(config: C, opened: Opened[C], extensions: Extensions | None = None) -> int:
    """Check the machine, train with one config, and return the exit status."""
    check_libraries(config)
    extensions = with_hooks(config.trainer.on_step, extensions)
    config = number_run(config)
    ranks = sum(spec.world_size for spec in pool_specs(config))
    with contextlib.ExitStack() as stack:
        entered = stack.enter_context(session(config.trainer, ranks, extensions.from_python))
        trainer = stack.enter_context(opened(config, extensions))
        for text in trainer.introduction():
            entered.say(text)
        saved, only_validates = trainer.prepare(), trainer.only_validates
        resumed, subfolder = (None, "validation") if only_validates else (saved, "")
        with entered.tracking(trainer.config, trainer.total_steps, resumed, subfolder) as tracking, frozen_objects():
            stop = entered.listen(trainer.stop, extensions.from_python)
            trainer.fit(tracking)
            trainer.finish_saving()  # write all checkpoints before the trackers report the run as finished
            if stop.status:
                tracking.ending = "stopped"
        if stop.status:
            entered.say_how_to_resume()
        elif not only_validates:
            path = trainer.export_path()
            if path is not None:
                entered.say(f"wrote {path}")
            entered.say_results(trainer.total_steps, trainer.source.steps_per_epoch, path)
    return stop.status
