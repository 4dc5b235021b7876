"""Models of clients, and the execution of their commands on the role.

    model = Model(facts, parts, add_sampler)
    future = model.log.submit(1, "forward_backward", content)

All or nothing: if a part of a batch fails, the next `optim_step` fails as well, with the same reason, clears the
gradients and changes no weight. Scripts submit both before they wait for the first result, and would otherwise train on
a part of their batch.

After a crash of the worker process or of the server, a model is restored: its engine loads the last state that the
server has saved, and executes the commands of the log behind it again. Their results have been delivered, so the new
ones have to be equal.
"""

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from camshaft import storage
from camshaft.engine import StepHyperparameters
from camshaft.errors import CamshaftError, WorkerError
from camshaft.roles.served import StepReport
from camshaft.seat import Seat
from camshaft.service import codec
from camshaft.service.checkpoints import Checkpoints, Record, SavedPath, lora_of
from camshaft.service.commands import Command, CommandLog, Job, JobQueue, failure_of
from camshaft.service.errors import CommandError
from camshaft.service.futures import Future, Futures, Result, Statement
from camshaft.service.history import History
from camshaft.service.process import PerRank, RoleProcess
from camshaft.service.sampling import Version, Versions
from camshaft.service.shares import Shares
from camshaft.service.store import Entry, abandon_entry, drop_content, set_state
from camshaft.wire import messages, schemas

T = TypeVar("T")
LAST = "last"
"""Name under which the server saves a model whose session ends."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Creation:
    """The content of command 0, which creates a model."""

    record: Record
    path: str | None = None
    """Saved weights that are loaded."""
    with_optimizer: bool = False

    @staticmethod
    def read(content: bytes) -> "Creation":
        values = json.loads(content)
        return Creation(Record(**values.pop("record")), **values)


@dataclass(frozen=True)
class ModelFacts:
    """Base model, adapter and limits of a model."""

    identifier: str
    folder: str
    """Folder of the base model."""
    creation: Creation
    limits: codec.Limits

    @property
    def record(self) -> Record:
        return self.creation.record

    def describe(self, parts: "Parts") -> dict[str, Any]:
        """Return the config of the model and of the server, for the run folder."""
        server = parts.role.config.model_dump(mode="json", exclude={"model", "new_key", "keys"})
        return {"model": {**asdict(self.record), "path": self.creation.path}, **server}


@dataclass(frozen=True)
class Parts:
    """The parts of the server that models use."""

    role: RoleProcess
    queue: JobQueue
    futures: Futures
    checkpoints: Checkpoints
    versions: Versions


@dataclass(frozen=True)
class Operation:
    """A command without its future."""

    run: Callable[[], Result]
    abandon: Callable[[str], Result]
    """Called in its place, with the reason."""
    replay: Callable[[], Result | None] | None = None
    """Called to restore a model. Return the result, or None if it is not compared. None: the command is left out."""
    num_tokens: int | None = None
    """Number of tokens of a training command."""


class Model:
    """A model in training. Its commands are executed in the thread of the training queue."""

    def __init__(
        self,
        facts: ModelFacts,
        parts: Parts,
        add_sampler: Callable[[int, Version], str],
        limit_published: Callable[[], None],
    ):
        """`add_sampler` creates a sampler with a number in the session of the model, and returns its id.

        `limit_published` removes published weights of the model beyond the limit.
        """
        self.facts, self.parts, self.role = facts, parts, parts.role
        self.add_sampler, self.limit_published = add_sampler, limit_published
        self.log = CommandLog(facts.identifier, parts.queue, parts.futures, self.prepare)
        self.holds_engine = True
        """False if the role has no engine for the model, now and in the future."""
        self._ended: str | None = "the model has not been created"
        """Why the model cannot be used."""
        self._failure: str | None = None
        """Why the gradients are incomplete, until the next optimizer step."""
        self._generation: int | None = None
        """Generation of the worker process that has the model."""
        self._seats: list[Seat] = []
        """Seat of each rank in the engine."""
        self._executed = 0
        """Number of the last executed command."""
        self._num_steps = 0
        """Number of optimizer steps since the last saved state."""
        self.history = History(
            parts.checkpoints.folder_of(facts.identifier), facts.identifier, parts.queue.times, facts.describe(parts)
        )
        self._has_unsaved_steps = False
        self.is_kept = False
        """True if it could not be saved at the end of its session, so that the log keeps it for the next start."""

    @property
    def identifier(self) -> str:
        return self.facts.identifier

    # -- creation and restoration -------------------------------------------------------------------

    def create(self, future: Future, has_room: Callable[[], bool] = lambda: True) -> Job:
        """Build the model when there is room for it, with saved weights if it is created from a path."""
        creation = self.facts.creation

        def run() -> Result:
            self._build()
            answer: dict[str, Any] = {"model_id": self.identifier, "type": "create_model"}
            writes: tuple[Statement, ...] = ()
            if creation.path is not None:
                self._load(creation.path, creation.with_optimizer)
                writes = self._save_state(0)
                answer |= {"type": "load_weights", "path": creation.path}
            self._generation, self._ended = self.role.generation, None
            self.history.open()
            return replace(Result.of_json(answer), writes=writes)

        def execute(_: Any) -> list[Result]:
            try:
                return [run()]
            except WorkerError:
                raise
            except Exception as error:
                self.was_created(f"{error}")
                with contextlib.suppress(WorkerError):  # which has no engine left
                    self._call("release")
                raise

        def give_up(reason: str) -> Result:
            self.was_created(reason)
            return Result.of_error("server", f"{self._ended}")

        return Job(future, execute, keeps_content=True, give_up=give_up, is_ready=has_room)

    def was_created(self, error: str | None = None) -> None:
        """Continue after the creation, which may have failed with an error."""
        self._ended = error and f"the model {self.identifier} could not be created: {error}".partition("\n")[0]
        self.holds_engine = error is None

    def ensure_current(self) -> None:
        """Restore the model if the worker process has been started since. Raise `CommandError` if it has ended."""
        if self._ended is not None:
            raise CommandError(f"{self._ended}; create a new model, or load saved weights")
        if self._generation != self.role.generation:
            try:
                self._restore()
            except CommandError as error:
                self._ended = f"the model {self.identifier} cannot be restored: {error}"
                logger.error("%s", self._ended)
                raise CommandError(f"{self._ended}; create a new model, or load saved weights") from error

    def _restore(self) -> None:
        """Load the last saved state, and execute the commands behind it."""
        store = self.parts.queue.store
        store.flush()
        state = store.state(self.identifier)
        self._build()
        if state is not None:
            self._call("load", str(self._states() / str(state.number)), True)
        generation = self.role.generation
        self._failure, self._num_steps = None, 0
        self._executed = 0 if state is None else state.number
        self.history.open()
        self._has_unsaved_steps = state is not None and state.is_unsaved
        for entry in store.executed(self.identifier, self._executed):
            self._replay(entry)
            self._executed = entry.number
        self._generation = generation
        logger.info("model %s is restored, up to command %d", self.identifier, self._executed)

    def _replay(self, entry: Entry) -> None:
        """Execute a command that has been executed before, and compare the results."""
        assert entry.result is not None
        if entry.kind == "save_weights" and not entry.result.has_failed:
            self._has_unsaved_steps = False
        if entry.content is None:
            return
        operation = self._operation(entry)
        if entry.abandoned is not None:
            operation.abandon(entry.abandoned)
            return
        if operation.replay is None:
            return
        try:
            result = operation.replay()
        except WorkerError:
            raise
        except Exception as error:
            result = failure_of(error)
        if result is None or entry.is_expired:
            return
        difference, tolerance = codec.difference(entry.result, result), self.role.config.replay_tolerance
        if difference > tolerance:
            raise CommandError(
                f"command {entry.number} ({entry.kind}), which was executed again, gave a result that differs by "
                f"{difference:g} from the delivered one; if the engine is not deterministic, start the server with a "
                f"larger replay_tolerance ({tolerance:g})"
            )

    def _build(self) -> None:
        record = self.facts.record
        arguments = self.identifier, self.facts.folder, lora_of(record), record.seed
        self.parts.versions.roles.set_dtypes()
        self._seats = self.role.call_ranks("create", *arguments)

    def _states(self) -> Path:
        return self.parts.checkpoints.states_of(self.identifier)

    def _save_state(self, number: int) -> tuple[Statement, ...]:
        """Save a state of the server's own after a command. Return what records it, together with the result."""
        store = self.parts.queue.store
        store.flush()  # the record of the last state, which may be the state of the last command
        self.remove_states(but=store.state(self.identifier))
        self._call("save", str(self._states() / str(number)), True)
        versions = self.parts.versions.published_by(self.identifier)
        self.role.call("keep_versions", [version.identifier for version in versions if version.source.model_id])
        self._num_steps = 0
        return set_state(self.identifier, number, self._has_unsaved_steps)

    def remove_states(self, but: Any = None) -> None:
        """Remove the saved states of the server's own, except one."""
        folder = self._states()
        for entry in folder.iterdir() if folder.is_dir() else ():
            if but is None or entry.name != str(but.number):
                storage.remove(entry)

    # -- commands -------------------------------------------------------------------------------------

    def prepare(self, entry: Entry, future: Future) -> Command:
        """Return the command of an entry of the log."""
        operation, number = self._operation(entry), entry.number

        def execute(_: Any) -> list[Result]:
            try:
                self.ensure_current()
            except CommandError as error:  # the command is not executed, nor when the model is restored
                return [replace(failure_of(error), writes=(drop_content(self.identifier, number),))]
            try:
                return [operation.run()]
            finally:
                self._executed = number

        def abandon(reason: str) -> Result:
            self.ensure_current()
            self._executed = number
            return operation.abandon(reason)

        def give_up(reason: str) -> Result:
            self.parts.queue.store.write(abandon_entry(self.identifier, number, reason))
            abandon(reason)
            return Result.of_error("server", reason)

        keeps_content, num_tokens = operation.replay is not None, operation.num_tokens
        job = Job(future, execute, keeps_content=keeps_content, num_tokens=num_tokens, give_up=give_up)
        return Command(job, abandon)

    def _operation(self, entry: Entry) -> Operation:
        content = entry.content or b""
        if entry.kind == "forward_backward":
            return self._train(messages.decode(messages.ForwardBackwardRequest, content))
        if entry.kind == "optim_step":
            return self._step(entry.number, _read(schemas.OptimStep, content))
        if entry.kind == "save_weights":
            return self._save(entry.number, _read(schemas.SaveWeights, content))
        if entry.kind == "load_weights":
            return self._load_command(entry.number, _read(schemas.LoadWeights, content))
        if entry.kind == "save_weights_external":
            return self._export(_read(schemas.SaveWeightsExternal, content))
        assert entry.kind == "save_weights_for_sampler", entry.kind
        return self._publish(entry.number, _read(schemas.SaveWeightsForSampler, content))

    def _train(self, request: Any) -> Operation:
        """Compute log-probs and, unless the request is for the forward pass only, add gradients."""

        def run() -> Result:
            try:
                loss, options = codec.read_loss(request)
                rows = codec.read_rows(request, loss, self.facts.limits)
                shares = Shares.of(rows, self._seats)
                arguments = PerRank(shares.parts), loss.name, options, request.forward_only
                outputs = self.role.call_ranks("forward_backward", self.identifier, *arguments)
            except WorkerError:
                raise
            except Exception as error:
                fail(f"{error}".partition("\n")[0])
                raise
            log_probs, value = shares.merge(outputs)
            if not request.forward_only:
                self.history.add(value, len(rows), codec.count_trained(rows))
            return Result.of_message(codec.write_output(log_probs, value))

        def fail(reason: str) -> Result:
            if not request.forward_only:
                self._failure = self._failure or reason
            return Result.of_error("user", reason)

        return Operation(run, fail, None if request.forward_only else run, codec.count_tokens(request))

    def _step(self, number: int, request: schemas.OptimStep) -> Operation:
        """Apply the gradients, unless a part of them is missing."""
        settings = request.adam_params
        assert settings is not None

        def apply() -> Result:
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
            self._num_steps += 1
            self._has_unsaved_steps = True
            self.history.write(number, hyperparameters.lr, report.grad_norm)
            return Result.of_json({"type": "optim_step", "metrics": {"grad_norm": report.grad_norm}})

        def run() -> Result:
            result = apply()
            if self._num_steps < self.role.config.save_every:
                return result
            try:
                return replace(result, writes=self._save_state(number))
            except CommandError as error:  # the log keeps the commands since the last state
                logger.error("the state of %s cannot be saved: %s", self.identifier, error)
                return result

        def clear(reason: str) -> str:
            self._call("clear_gradients")
            self.history.clear()
            self._failure = None
            return (
                "optim_step changed no weight and cleared the gradients, because a command of its batch failed: "
                f"{reason}"
            )

        return Operation(run, lambda reason: Result.of_error("user", clear(reason)), apply)

    def _save(self, number: int, request: schemas.SaveWeights) -> Operation:
        """Save weights and optimizer under a name."""

        def run() -> Result:
            path = SavedPath.of_model(self.identifier, "weights", request.path)
            self._write(path, number, request)
            self._has_unsaved_steps = False
            return Result.of_json({"type": "save_weights", "path": str(path)})

        return Operation(run, _failed)

    def _export(self, request: schemas.SaveWeightsExternal) -> Operation:
        """Refuse to export weights, with the command that does it.

        `tinker checkpoint download` exports a model that it has created from the saved weights.
        """

        def run() -> Result:
            checkpoints, loaded = self.parts.checkpoints, self.facts.creation.path
            saved = None if loaded is None or self._executed else checkpoints.find(SavedPath.parse(loaded))
            if saved is not None:
                first, folder = "", saved.folder
            else:
                first = f"call save_state({request.path!r}), and "
                folder = checkpoints.folder_of(self.identifier) / "weights" / f"{request.path}.[0-9]*"
            raise CommandError(
                f"this server does not export weights to clients; {first}run `camshaft export --model "
                f"{self.facts.folder} {folder} OUTPUT` on its machine"
            )

        return Operation(run, _failed)

    def _load_command(self, number: int, request: schemas.LoadWeights) -> Operation:
        """Replace the weights by saved ones, with or without the state of the optimizer.

        The state is saved at once, so that restoring the model does not depend on the saved weights.
        """

        def run() -> Result:
            self._load(request.path, request.optimizer)
            try:
                writes = self._save_state(number)
            except CommandError:
                self._generation = None  # the weights are not those of the log
                raise
            answer = {"type": "load_weights", "path": request.path, "model_id": self.identifier}
            return replace(Result.of_json(answer), writes=writes)

        return Operation(run, _failed)

    def _publish(self, number: int, request: schemas.SaveWeightsForSampler) -> Operation:
        """Publish the weights for samplers, under a name or for a sampler of the session."""
        versions, checkpoints = self.parts.versions, self.parts.checkpoints

        def run() -> Result:
            answer: dict[str, Any] = {"path": None, "sampling_session_id": None}
            if request.path is not None:
                path = SavedPath.of_model(self.identifier, "sampler_weights", request.path)
                self._write(path, number, request)
                version = versions.of_saved(path, checkpoints.get(path), self.facts.folder, self.identifier)
                answer["path"] = str(path)
            else:
                version = versions.of_model(self.identifier, number, self.facts.folder)
            self._call("publish", version.identifier)
            version.was_published()
            if request.sampling_session_seq_id is not None:
                answer["sampling_session_id"] = self.add_sampler(request.sampling_session_seq_id, version)
            self.limit_published()
            return Result.of_json({"type": "save_weights_for_sampler", **answer})

        def replay() -> None:
            version = versions.find(self.identifier, number)
            if version is not None and not self.role.call("has_version", version.identifier):
                self._call("publish", version.identifier)

        return Operation(run, _failed, None if request.path is not None else replay)

    # -- the end --------------------------------------------------------------------------------------

    def end(self, future: Future) -> Job:
        """Save the model under the name `last`, if it has steps that are not saved, and free its engine."""

        def run() -> Result:
            try:
                if self._ended is None:
                    self.ensure_current()
                    self._save_last()
            except WorkerError:
                raise
            except Exception:
                logger.exception("%s cannot be saved at the end of its session", self.identifier)
                self.is_kept = True
            return free("its session has ended")

        def give_up(reason: str) -> Result:
            self.is_kept = True
            return free(reason)

        def free(reason: str) -> Result:
            with contextlib.suppress(WorkerError):
                self._call("release")
            self.holds_engine = False
            self.history.close("finished")
            self._ended = f"the model {self.identifier} has been released: {reason}"
            return Result.of_json({})

        return Job(future, lambda _: [run()], give_up=give_up)

    def suspend(self, future: Future) -> Job:
        """Save the model before the server stops: for the next start, and under the name `last` as for its end."""

        def run() -> Result:
            if self._ended is not None:
                return Result.of_json({})
            self.ensure_current()
            writes: tuple[Statement, ...] = ()
            if self._num_steps and self._failure is None:
                with contextlib.suppress(CommandError):  # there are gradients, which are computed again
                    writes = self._save_state(self._executed)
            self._save_last()
            self.history.close("stopped")
            return Result(b"{}", writes=writes)

        return Job(future, lambda _: [run()])

    def _save_last(self) -> None:
        """Save steps that are not saved. The gradients are lost."""
        if self._has_unsaved_steps:
            self._call("clear_gradients")
            record = replace(self.facts.record, by_server=True)
            path = self._last_path()
            self.parts.checkpoints.write(path, record, lambda folder: self._call("save", folder, True), overwrite=True)

    def _last_path(self) -> SavedPath:
        """Return the path for the state at the end of a session, which is not one that the client has chosen."""
        path = SavedPath.of_model(self.identifier, "weights", LAST)
        earlier = self.parts.checkpoints.find(path)
        is_free = earlier is None or earlier.record.by_server
        return path if is_free else SavedPath.of_model(self.identifier, "weights", f"{LAST}-of-server")

    def _write(
        self, path: SavedPath, number: int, request: schemas.SaveWeights | schemas.SaveWeightsForSampler
    ) -> None:
        is_state = path.kind == "weights"
        self.parts.checkpoints.write(
            path,
            self.facts.record,
            lambda folder: self._call("save", folder, is_state),
            overwrite=request.overwrite,
            number=number,
            ttl_seconds=request.ttl_seconds,
        )

    def _load(self, text: str, with_optimizer: bool) -> None:
        checkpoints, record = self.parts.checkpoints, self.facts.record
        with checkpoints.lock:
            path, saved = checkpoints.read(text, record.owner)
            if saved.record.base_model != record.base_model or saved.record.rank != record.rank:
                raise CommandError(
                    f"{path} has the base model {saved.record.base_model} and rank {saved.record.rank}, but this model "
                    f"has {record.base_model} and rank {record.rank}; create a client from the path"
                )
            self._call("load", str(saved.folder), with_optimizer)
        self.history.clear()
        self._failure, self._has_unsaved_steps = None, False

    def _call(self, method: str, *arguments: Any) -> Any:
        return self.role.call(method, self.identifier, *arguments)


def _failed(reason: str) -> Result:
    return Result.of_error("user", reason)


def _read(schema: type[T], content: bytes) -> T:
    return schemas.read(schema, json.loads(content))[0]
