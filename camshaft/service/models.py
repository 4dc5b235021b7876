"""Models of clients, and the execution of their commands on the role.

    model = Model(facts, role, log, checkpoints)
    future = log.submit(1, digest, lambda: model.train(futures.create(session), request))

All or nothing: if a part of a batch fails, the next `optim_step` fails as well, with the same reason, clears the
gradients and changes no weight. Scripts submit both before they wait for the first result, and would otherwise train on
a part of their batch.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from camshaft.config.engine import LoRAConfig
from camshaft.engine import StepHyperparameters
from camshaft.errors import CamshaftError, WorkerError
from camshaft.roles.served import StepReport
from camshaft.service import codec
from camshaft.service.checkpoints import Checkpoints, Record, SavedPath
from camshaft.service.commands import Command, CommandLog, Job
from camshaft.service.errors import CommandError
from camshaft.service.futures import Future, Result
from camshaft.service.process import RoleProcess
from camshaft.service.sampling import Version
from camshaft.wire.schemas import AdamSettings

LAST = "last"
"""Name under which the server saves a model whose session ends."""


@dataclass(frozen=True)
class ModelFacts:
    """Base model, adapter and limits of a model."""

    identifier: str
    folder: str
    """Folder of the base model."""
    record: Record
    limits: codec.Limits

    def lora(self) -> LoRAConfig | None:
        return lora_of(self.record)


def lora_of(record: Record) -> LoRAConfig | None:
    """Return the adapter of a model; None for rank 0, which trains all weights."""
    if not record.rank:
        return None
    return LoRAConfig(
        rank=record.rank,
        alpha=record.alpha,
        seed=record.seed,
        train_attn=record.train_attn,
        train_mlp=record.train_mlp,
        train_unembed=record.train_unembed,
    )


class Model:
    """A model in training. Its methods return commands, which are executed in the thread of the queue."""

    def __init__(self, facts: ModelFacts, role: RoleProcess, log: CommandLog, checkpoints: Checkpoints):
        self.facts, self.role, self.log, self.checkpoints = facts, role, log, checkpoints
        self.version: Version | None = None
        """Published weights that are those of the model."""
        self._failure: str | None = None
        """Why the gradients are incomplete, until the next optimizer step."""
        self._ended: str | None = "the model has not been created"
        """Why the model cannot be used."""
        self.holds_engine = True
        """False if the role has no engine for the model, now and in the future."""
        self._generation = 0
        self._has_unsaved_steps = False

    @property
    def identifier(self) -> str:
        return self.facts.identifier

    def create(self, future: Future, path: SavedPath | None = None, with_optimizer: bool = False) -> Job:
        """Build the model, with saved weights if a path is given."""

        def run() -> Result:
            facts = self.facts
            self.role.call("create", facts.identifier, facts.folder, facts.lora(), facts.record.seed)
            self._generation = self.role.generation
            answer: dict[str, Any] = {"model_id": facts.identifier, "type": "create_model"}
            if path is not None:
                self._load(str(path), with_optimizer)
                answer |= {"type": "load_weights", "path": str(path)}
            self._ended = None
            return Result.of_json(answer)

        def execute(_: Any) -> list[Result]:
            try:
                return [run()]
            except CamshaftError as error:
                self.holds_engine = False
                self._ended = f"the model {self.identifier} could not be created: {error}".partition("\n")[0]
                with contextlib.suppress(WorkerError):  # which has no engine left
                    self.role.call("release", self.identifier)
                raise

        return Job(future, execute)

    def train(self, future: Future, request: Any) -> Command:
        """Compute log-probs and, unless the request is for the forward pass only, add gradients."""

        def run() -> Result:
            try:
                loss, options = codec.read_loss(request)
                rows = codec.read_rows(request, loss, self.facts.limits)
                output = self._call("forward_backward", rows, loss.name, options, request.forward_only)
            except CamshaftError as error:
                fail(f"{error}".partition("\n")[0])
                raise
            return Result.of_message(codec.write_output(output.ragged("log_probs"), output.meta_info["loss"]))

        def fail(reason: str) -> Result:
            if not request.forward_only:
                self._failure = self._failure or reason
            return Result.of_error("user", reason)

        return self._command(future, run, fail)

    def step(self, future: Future, settings: AdamSettings) -> Command:
        """Apply the gradients, unless a part of them is missing."""

        def run() -> Result:
            if self._failure is not None:
                raise CommandError(clear(self._failure))
            try:
                hyperparameters = StepHyperparameters(
                    lr=settings.learning_rate,
                    betas=(settings.beta1, settings.beta2),
                    eps=settings.eps,
                    weight_decay=settings.weight_decay,
                    clip_grad=settings.grad_clip_norm,
                )
            except CamshaftError as error:
                raise CommandError(f"optim_step: {error}; correct adam_params") from error
            report: StepReport = self._call("optimizer_step", hyperparameters)
            self.version, self._has_unsaved_steps = None, True
            return Result.of_json({"type": "optim_step", "metrics": {"grad_norm": report.grad_norm}})

        def clear(reason: str) -> str:
            self._failure = None
            self._call("clear_gradients")
            return (
                "optim_step changed no weight and cleared the gradients, because a forward_backward before it failed: "
                f"{reason}"
            )

        return self._command(future, run, lambda reason: Result.of_error("user", clear(reason)))

    def save(self, future: Future, name: str | None, overwrite: bool) -> Command:
        """Save weights and optimizer under a name."""

        def run() -> Result:
            path = SavedPath.of_model(self.identifier, "weights", name)
            self._save(path, self.facts.record, overwrite)
            self._has_unsaved_steps = False
            return Result.of_json({"type": "save_weights", "path": str(path)})

        return self._command(future, run)

    def load(self, future: Future, path: str, with_optimizer: bool) -> Command:
        """Replace the weights by saved ones, with or without the state of the optimizer."""

        def run() -> Result:
            self._load(path, with_optimizer)
            return Result.of_json({"type": "load_weights", "path": path, "model_id": self.identifier})

        return self._command(future, run)

    def publish(
        self, future: Future, name: str | None, overwrite: bool, register: Callable[[Version], dict[str, Any]]
    ) -> Command:
        """Publish the weights for samplers, and save them if they get a name. `register` completes the answer."""

        def run() -> Result:
            path = None if name is None else SavedPath.of_model(self.identifier, "sampler_weights", name)
            if path is not None:
                self._save(path, self.facts.record, overwrite)
            if self.version is None or not self.version.is_usable():
                version = Version(self.role, self.facts.folder)
                self._call("publish", version.identifier)
                version.was_published()
                self.version = version
            if path is not None:
                saved = self.checkpoints.find(path)
                assert saved is not None
                self.version.path, self.version.saved = path, (str(saved.folder), self.facts.lora())
            return Result.of_json({"type": "save_weights_for_sampler", **register(self.version)})

        return self._command(future, run)

    def end(self, future: Future) -> Job:
        """Save the model under the name `last`, if it has steps that are not saved, and free its engine."""

        def run() -> Result:
            if self._ended is None and self._generation == self.role.generation:
                if self._has_unsaved_steps:
                    self._call("clear_gradients")
                    self._save(self._last_path(), replace(self.facts.record, by_server=True), True)
                self._call("release")
            self.holds_engine = False
            self._ended = f"the model {self.identifier} has been released, because its session has ended"
            return Result.of_json({})

        return Job(future, lambda _: [run()])

    def _last_path(self) -> SavedPath:
        """Return the path for the state at the end of a session, which is not one that the client has chosen."""
        path = SavedPath.of_model(self.identifier, "weights", LAST)
        earlier = self.checkpoints.find(path)
        is_free = earlier is None or earlier.record.by_server
        return path if is_free else SavedPath.of_model(self.identifier, "weights", f"{LAST}-of-server")

    def _save(self, path: SavedPath, record: Record, overwrite: bool) -> None:
        is_state = path.kind == "weights"
        self.checkpoints.write(path, record, lambda folder: self._call("save", folder, is_state), overwrite)

    def _load(self, text: str, with_optimizer: bool) -> None:
        path, saved = self.checkpoints.read(text, self.facts.record.owner)
        if saved.record.base_model != self.facts.record.base_model or saved.record.rank != self.facts.record.rank:
            raise CommandError(
                f"{path} has the base model {saved.record.base_model} and rank {saved.record.rank}, but this model has "
                f"{self.facts.record.base_model} and rank {self.facts.record.rank}; create a client from the path"
            )
        self.role.call("load", self.identifier, str(saved.folder), with_optimizer)
        self.version, self._failure, self._has_unsaved_steps = None, None, False

    def _command(
        self, future: Future, run: Callable[[], Result], abandon: Callable[[str], Result] | None = None
    ) -> Command:
        def execute(_: Any) -> list[Result]:
            self._check_usable()
            return [run()]

        return Command(Job(future, execute), abandon or (lambda reason: Result.of_error("user", reason)))

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise CommandError(f"{self._ended}; create a new one, or load saved weights")
        if self._generation != self.role.generation:
            self.holds_engine = False
            self._ended = f"the model {self.identifier} was lost when the worker process died"
            raise WorkerError(f"{self._ended}; create a new one, or load saved weights")

    def _call(self, method: str, *arguments: Any) -> Any:
        return self.role.call(method, self.identifier, *arguments)
