"""The requests of clients, as methods that the routes call.

    service = Service(config, role)
    service.start()
    service.create_session("local", body)["session_id"]
    service.submit_step("local", body)["request_id"]
    service.close()                                   # saves the models of all sessions

The argument `owner` is the name of the key of the request. Methods of several threads run at the same time, and only
the threads of the queues call the worker processes: one for training, and with `sampling_ranks` one for samples.

A new service continues with the sessions, models, samplers, commands and results of the log in its folder. `close`
keeps them.
"""

import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from camshaft.config.serve import ServeConfig
from camshaft.errors import WorkerError
from camshaft.plugins import TESTED_SDK
from camshaft.service import codec
from camshaft.service.checkpoints import Checkpoints, Record
from camshaft.service.commands import MAX_ROWS, Job, JobQueue, digest_of, failed_job, restore_future, write_json
from camshaft.service.errors import CommandError, Refused
from camshaft.service.futures import Future, Futures, Result
from camshaft.service.models import Creation, Model, ModelFacts, Parts
from camshaft.service.process import RoleProcess, Roles
from camshaft.service.published import PublishedLimit
from camshaft.service.runs import Runs
from camshaft.service.sampling import Sampler, Source, Version, Versions
from camshaft.service.sessions import Session, Sessions, check_owner, check_sdk
from camshaft.service.store import (
    LOG,
    Entry,
    Store,
    add_entry,
    add_sampler,
    add_session,
    expire_result,
    remove_session,
    session_of,
    use_sampler,
)
from camshaft.service.times import SAMPLE, SessionTimes
from camshaft.wire import schemas

SWEEP_SECONDS = 0.5
"""Interval at which sessions, gaps and results are checked against their time limits."""
CHECKPOINT_SECONDS = 15.0
"""Interval at which saved weights are checked against their time to live."""
SILENT_SECONDS = 30.0
"""Time without a heartbeat, of which the SDK sends one every 10 s, after which a session may make room for another."""
FINISH_SECONDS = 20.0
"""Time for which a client that finishes its session waits until its models are saved."""
MAX_RANK = 2**14
"""Maximum rank of an adapter for a model of unknown size."""
MAX_ERRORS = 1000
"""Maximum number of different errors of time limits that are logged."""
MODEL_FIELDS = ("train_attn", "train_mlp", "train_unembed")

logger = logging.getLogger(__name__)


class Service:
    """Sessions, models, samplers and results of a server."""

    def __init__(self, config: ServeConfig, role: RoleProcess, sampler: RoleProcess | None = None):
        """Without a `sampler`, the role also samples."""
        self.config, self.role = config, role
        self.bases = config.base_models()
        self.limits = {name: self._limits_of(folder) for name, folder in self.bases.items()}
        folder = Path(config.folder).absolute()
        self.store, self.checkpoints = Store(Path(config.log or folder / LOG).absolute()), Checkpoints(folder)
        self.futures, self.sessions, times = Futures(), Sessions(), SessionTimes()
        self.queue = self.sampling_queue = JobQueue(self.store, times)
        if sampler is not None:
            self.sampling_queue = JobQueue(self.store, times, SAMPLE)
        self.versions = Versions(Roles(role, sampler, self.bases.values()), self.queue, self._rebuild)
        self.parts = Parts(role, self.queue, self.futures, self.checkpoints, self.versions)
        self.limit = PublishedLimit(config.max_published, self.versions, self.sampling_queue, self.sessions)
        self.runs = Runs(self.checkpoints, self.sessions)
        self._is_closed = threading.Event()
        self._creating = threading.Lock()
        """Held while a model gets its place among `max_models`. It is acquired before the lock of a session."""
        self._sweep_errors: set[str] = set()
        """Errors of checks of time limits that have been logged."""
        self._sweeper = threading.Thread(target=self._sweep, name="sessions", daemon=True)
        self._restore()

    def start(self) -> None:
        for queue in {self.queue, self.sampling_queue}:
            queue.start()
        self._sweeper.start()

    def close(self) -> None:
        """Save the models of all sessions, and wait until this is done. The sessions remain in the log."""
        self._is_closed.set()
        self._sweeper.join()
        if self.sampling_queue is not self.queue:
            self.sampling_queue.close()
        models = [model for session in self.sessions for model in session.models.values()]
        self.queue.close([model.suspend(Future("")) for model in models])
        self.store.close()

    # -- restarts ---------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Continue with what is in the log."""
        for identifier, owner in self.store.sessions():
            self.sessions.add(Session(owner, identifier))
        for session_id, number, base_model, source, used_at in sorted(self.store.samplers(), key=lambda row: row[-1]):
            session, version = self.sessions.get(session_id), self.versions.restore(Source.from_json(source))
            version.used_at = used_at
            if base_model in self.bases:
                self._add_sampler(session, number, version, base_model)
            else:
                session.missing_samplers[number] = version
        for entry in self.store.entries():
            session = self.sessions.get(session_of(entry.subject))
            _, kind, number = entry.subject.split(":")
            if kind == "sample":
                self._restore_sample(session.samplers.get(int(number)), entry)
            elif entry.number == 0:
                self._restore_model(session, int(number), entry)
            elif (model := session.models.get(int(number))) is not None:
                model.log.restore(entry)
        if len(self.sessions):
            logger.info("%d sessions are restored from %s", len(self.sessions), self.store.path)
        self.queue.put(Job(Future(""), lambda _: [self._retain()]))

    def _retain(self) -> Result:
        """Remove the files of weights that no sampler uses, and of those beyond a limit that is smaller than before."""
        for session in self.sessions:
            for model in list(session.models.values()):
                self.limit.apply(session, model.identifier)
        self.role.call("retain_versions", self.versions.identifiers())
        return Result.of_json({})

    def _restore_sample(self, sampler: Sampler | None, entry: Entry) -> None:
        if sampler is None:  # its weights have been removed, or its base model is not served any more
            if entry.result is not None:
                restore_future(self.futures, entry)
            return
        future = restore_future(self.futures, entry)
        sampler.repetitions.add(entry.number, future)
        if entry.result is None:
            try:
                request, _ = schemas.read(schemas.Sample, json.loads(entry.content or b""))
                job = sampler.job(future, sampler.with_seed(request))
            except ValueError as error:
                job = failed_job(future, error)
            self.sampling_queue.put(job)

    def _restore_model(self, session: Session, number: int, entry: Entry) -> None:
        creation = Creation.read(entry.content or b"")
        if creation.record.base_model not in self.bases:
            logger.warning("%s needs the base model %s, which is not served", entry.subject, creation.record.base_model)
            session.missing_models[entry.subject] = future = Future(session.identifier, digest=entry.digest)
            session.creations.add(number, future)
            return
        model, future = self._new_model(session, number, creation), restore_future(self.futures, entry, is_kept=True)
        session.models[number] = model
        session.creations.add(number, future)
        if entry.result is None:
            self.queue.put(model.create(future))
        else:
            model.was_created(json.loads(entry.result.body)["error"] if entry.result.has_failed else None)

    def _rebuild(self, model_id: str) -> None:
        """Restore a model, which publishes its weights again."""
        session, _, number = model_id.partition(":train:")
        self.sessions.get(session).models[int(number)].ensure_current()

    # -- sessions ---------------------------------------------------------------------------------

    def create_session(self, owner: str, body: schemas.CreateSession) -> dict[str, Any]:
        """Open a session. The SDK prints its messages, which name all that differs from the hosted service."""
        warning = check_sdk(body.sdk_version)
        session = Session(owner)
        self.store.write(add_session(session.identifier, owner))
        self.store.flush()
        self.sessions.add(session)
        version = body.sdk_version or "unknown"
        logger.info("session %s of key %s, tinker %s (tested: %s)", session.identifier, owner, version, TESTED_SDK)
        return {
            "type": "create_session",
            "session_id": session.identifier,
            "info_message": self._deviations(),
            "warning_message": warning,
            "error_message": None,
        }

    def heartbeat(self, owner: str, body: schemas.OfSession) -> dict[str, Any]:
        self.sessions.find(body.session_id, owner)
        return {"type": "session_heartbeat"}

    def finish_session(self, owner: str, identifier: str) -> dict[str, Any]:
        """End a session, and wait until its models are saved, if they have steps that are not, and released."""
        self._end(self.sessions.find(identifier, owner)).wait(FINISH_SECONDS)
        return {}

    def _deviations(self) -> str:
        tied = [name for name in self.bases if self._is_tied(name)]
        sentences = ["camshaft serve trains and samples on this server; links to a console lead to the hosted service."]
        if tied:
            sentences.append(f"train_unembed=True: {', '.join(tied)} ties its embeddings; the head gets no adapter.")
        sentences.append(f"LoRA adapters have lora_alpha={self.config.lora_alpha:g}.")
        return " ".join(sentences)

    def _is_tied(self, name: str) -> bool:
        return bool(self.config.settings(self.bases[name]).values.get("tie_word_embeddings", True))

    def _end(self, session: Session) -> Future:
        """Close a session. Return the future of the last job for it."""
        end = Future(session.identifier)
        if not self.sessions.close(session):
            end.resolve(Result.of_json({}))
            return end
        with session.lock:
            for model in session.models.values():
                self.queue.put(model.end(Future(session.identifier)))
        self.sampling_queue.put(Job(Future(session.identifier), lambda _: [self._end_sampling(session, end)]))
        self.futures.forget(session.identifier)
        logger.info("session %s has ended", session.identifier)
        return end

    def _end_sampling(self, session: Session, end: Future) -> Result:
        """Forget the session after its last sample, and after the commands of its models."""
        try:
            with contextlib.suppress(WorkerError):  # new processes know no weights
                for version in self._unused_versions(session):
                    version.end_sampling()
        finally:
            self.queue.put(Job(end, lambda _: [self._forget(session)]))
        return Result.of_json({})

    def _forget(self, session: Session) -> Result:
        """Free the weights that no sampler uses any more, and forget the session, except for models to be kept."""
        self.queue.times.forget(session.identifier)
        kept = [*session.missing_models]
        for model in session.models.values():
            if model.is_kept:
                kept.append(model.identifier)
            else:
                model.remove_states()
        self.versions.forget(lambda: self._unused_versions(session))
        self.sessions.forget(session)
        return Result(b"{}", writes=remove_session(session.identifier, kept))

    def _unused_versions(self, session: Session) -> set[Version]:
        """Return the versions that a closed session has used, and no other one uses."""
        versions = session.used_versions()
        for model in session.models.values():
            versions.update(self.versions.published_by(model.identifier))
        return versions - self.sessions.used_versions()

    def _sweep(self) -> None:
        swept_at = time.monotonic()
        while not self._is_closed.wait(SWEEP_SECONDS):
            for session in self.sessions:
                self._attempt(lambda session=session: self._sweep_session(session))
            self._attempt(self._sweep_results)
            if time.monotonic() - swept_at > CHECKPOINT_SECONDS:
                swept_at = time.monotonic()
                self._attempt(self.sweep_checkpoints)

    def _attempt(self, check: Callable[[], None]) -> None:
        """Check time limits. An error does not end the checks, and is logged once."""
        try:
            check()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text not in self._sweep_errors and len(self._sweep_errors) < MAX_ERRORS:
                self._sweep_errors.add(text)
                logger.exception("time limits cannot be checked; the server tries again")

    def _sweep_session(self, session: Session) -> None:
        silence = time.monotonic() - session.seen_at
        if silence > self.config.session_timeout:
            logger.warning("session %s sent no heartbeat for %g s", session.identifier, silence)
            self._end(session)
        for model in list(session.models.values()):
            model.log.end_gap(self.config.gap_timeout)

    def _sweep_results(self) -> None:
        for future in self.futures.expire(self.config.result_ttl):
            self.store.write(expire_result(future))

    def sweep_checkpoints(self) -> None:
        """Remove saved weights that have expired, unless a sampler uses them."""
        used = {f"{version.source.saved_folder}" for version in self.sessions.used_versions()}
        if self.checkpoints.lock.acquire(blocking=False):  # otherwise weights are being saved; the next time
            try:
                self.checkpoints.sweep(used)
            finally:
                self.checkpoints.lock.release()

    # -- models -----------------------------------------------------------------------------------

    def capabilities(self) -> dict[str, Any]:
        models = [
            {"model_name": name, "max_context_length": limits.context, "trainable": True, "sampleable": True}
            for name, limits in self.limits.items()
        ]
        return {"supported_models": models}

    def create_model(self, owner: str, body: schemas.CreateModel) -> dict[str, Any]:
        session = self.sessions.find(body.session_id, owner)
        self._check_base(body.base_model)
        settings = body.lora_config or schemas.LoraSettings(rank=0)
        self._check_optimizer(body.optimizer_config)
        max_rank = self.config.settings(self.bases[body.base_model]).hidden_size() or MAX_RANK
        if not 0 <= settings.rank <= max_rank:
            raise Refused(
                f"lora_config.rank={settings.rank} is not from 0, which trains all weights, to {max_rank}, the largest "
                f"one for {body.base_model}"
            )
        seed = self.config.seed + body.model_seq_id if settings.seed is None else settings.seed
        groups = {name: getattr(settings, name) for name in MODEL_FIELDS}
        if settings.rank and not any(groups.values()):
            raise Refused("lora_config trains no group of layers; set train_attn, train_mlp or train_unembed")
        record = Record(body.base_model, owner, settings.rank, self.config.lora_alpha, seed, **groups)
        digest = digest_of("create_model", write_json(body))
        return self._open_model(session, body.model_seq_id, Creation(record), digest)

    def _open_model(self, session: Session, number: int, creation: Creation, digest: bytes) -> dict[str, Any]:
        """Create a model with a number in its session, unless the same request has done so."""
        with self._creating, session.lock:
            self.sessions.find(session.identifier, session.owner)  # it may have ended in the meantime
            future = session.creations.find(number, digest)
            model_id = f"{session.identifier}:train:{number}"
            if future is None:
                self._make_room(session.owner)
                self._check_disk()
                earlier = self.sessions.models_with_engines()
                session.models[number] = model = self._new_model(session, number, creation)
                future = self.futures.create(session.identifier, (model_id, 0), digest=digest, is_kept=True)
                kind = "create_model" if creation.path is None else "load_weights"
                self.store.write(add_entry(Entry(model_id, 0, kind, digest, future.identifier, write_json(creation))))
                session.creations.add(number, future)
                self.queue.put(model.create(future, lambda: self._has_room(earlier)))
        self.store.flush()
        return {"request_id": future.identifier, "model_id": model_id}

    def _new_model(self, session: Session, number: int, creation: Creation) -> Model:
        base = creation.record.base_model
        facts = ModelFacts(f"{session.identifier}:train:{number}", self.bases[base], creation, self.limits[base])
        return Model(
            facts,
            self.parts,
            lambda number, version: self._add_sampler(session, number, version, base).identifier,
            lambda: self.limit.apply(session, facts.identifier),
        )

    def _make_room(self, owner: str) -> None:
        """End silent sessions if there are too many models. Raise `Refused` if that is not enough."""
        sessions = sorted(self.sessions, key=lambda session: session.seen_at)
        for session in sessions:
            if self._num_models() < self.config.max_models:
                return
            if session.models and time.monotonic() - session.seen_at > SILENT_SECONDS:
                self._end(session)
        if self._num_models() >= self.config.max_models:
            own = [session.identifier for session in sessions if session.models and session.owner == owner]
            sentence = f"those of this key are in the sessions {', '.join(own)}" if own else "none is of this key"
            raise Refused(
                f"{self._num_models()} models are in training ({sentence}), and the server was started with "
                f"max_models={self.config.max_models}; end one of these programs, or start the server with a larger one"
            )

    def _num_models(self) -> int:
        """Return the number of models of open sessions that have an engine or will get one."""
        return sum(model.holds_engine for session in self.sessions for model in list(session.models.values()))

    def _has_room(self, earlier: Sequence[Model]) -> bool:
        """Return False while earlier models, those of sessions that are about to end, take all places."""
        return sum(model.holds_engine for model in earlier) < self.config.max_models

    def get_info(self, owner: str, body: schemas.OfModel) -> dict[str, Any]:
        _, model = self.sessions.of_model(body.model_id, owner)
        record, folder = model.facts.record, model.facts.folder
        name = record.base_model
        architecture = str(self.config.settings(folder).values.get("model_type", "unknown"))
        tokenizer = str(Path(folder).absolute()) if name == folder and Path(folder).is_dir() else name
        data = {"arch": architecture, "model_name": name, "tokenizer_id": tokenizer}
        return asdict(schemas.ModelInfo(body.model_id, data, bool(record.rank), record.rank, name))

    # -- commands ---------------------------------------------------------------------------------

    def submit_training(self, owner: str, request: Any) -> dict[str, Any]:
        """Submit a `ForwardBackwardRequest`."""
        content = request.SerializeToString(deterministic=True)
        return self._submit(owner, request.model_id, request.seq_id, "forward_backward", content)

    def submit_step(self, owner: str, body: schemas.OptimStep) -> dict[str, Any]:
        if body.optimizer_params is not None or body.adam_params is None:
            raise Refused("optim_step: this server has AdamW only; pass AdamParams")
        return self._submit(owner, body.model_id, body.seq_id, "optim_step", write_json(body))

    def submit_save(self, owner: str, body: schemas.SaveWeights) -> dict[str, Any]:
        return self._submit(owner, body.model_id, body.seq_id, "save_weights", write_json(body))

    def submit_export(self, owner: str, body: schemas.SaveWeightsExternal) -> dict[str, Any]:
        """Submit a command that fails. A refusal would leave a gap behind which all later commands wait."""
        if body.seq_id is None:
            raise Refused("save_weights_external requires seq_id")
        return self._submit(owner, body.model_id, body.seq_id, "save_weights_external", write_json(body))

    def submit_load(self, owner: str, body: schemas.LoadWeights) -> dict[str, Any]:
        """Load weights into a model, or create a model from them."""
        if body.model_id is not None and body.seq_id is not None:
            return self._submit(owner, body.model_id, body.seq_id, "load_weights", write_json(body))
        if body.session_id is None or body.model_seq_id is None:
            raise Refused("load_weights requires model_id and seq_id, or session_id and model_seq_id")
        session = self.sessions.find(body.session_id, owner)
        self._check_optimizer(body.optimizer_config)
        try:
            path, saved = self.checkpoints.read(body.path, owner)
        except CommandError as error:
            raise Refused(str(error), HTTPStatus.NOT_FOUND) from error
        self._check_base(saved.record.base_model)
        creation = Creation(replace(saved.record, by_server=False), str(path), body.optimizer)
        return self._open_model(session, body.model_seq_id, creation, digest_of("load_weights", write_json(body)))

    def submit_publish(self, owner: str, body: schemas.SaveWeightsForSampler) -> dict[str, Any]:
        """Publish weights under a name, or for a sampler of this session. Weights are snapshots of either kind."""
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise Refused("save_weights_for_sampler requires either path or sampling_session_seq_id")
        return self._submit(owner, body.model_id, body.seq_id, "save_weights_for_sampler", write_json(body))

    def _submit(self, owner: str, model_id: str, number: int, kind: str, content: bytes) -> dict[str, Any]:
        """Submit a command of a model, and return the answer to its request."""
        session, model = self.sessions.of_model(model_id, owner)

        def admit() -> None:
            self._check_disk()
            if self.futures.num_pending(session.identifier) >= self.config.max_futures:
                raise Refused(
                    f"{self.config.max_futures} results of this session are pending (max_futures); wait for some of "
                    "them before the next call"
                )

        future = model.log.submit(number, kind, content, admit)
        return {"request_id": future.identifier, "model_id": model_id}

    def retrieve(self, owner: str, body: schemas.RetrieveFuture, seconds: float) -> Result | None:
        """Return a result, or None if it is still pending after `seconds`."""
        future = self.futures.find(body.request_id)
        if future is None:
            raise Refused(
                f"there is no result {body.request_id}: it was fetched more than {self.config.result_ttl:g} s ago "
                "(result_ttl), its session has ended, or its base model is not served any more; send the request again "
                "with a new number, or create a new ServiceClient",
                HTTPStatus.GONE,
            )
        check_owner(self.sessions.find(future.session, owner).owner, owner)
        return self.futures.fetch(future, seconds)

    # -- samplers ---------------------------------------------------------------------------------

    def create_sampling_session(self, owner: str, body: schemas.CreateSamplingSession) -> dict[str, Any]:
        session = self.sessions.find(body.session_id, owner)
        with self.versions.lock:
            if body.model_path is not None:
                name, version = self._saved_version(body.model_path, owner)
            elif body.base_model is not None:
                self._check_base(body.base_model)
                name, version = body.base_model, self.versions.of_base(self.bases[body.base_model])
            else:
                raise Refused("create_sampling_session requires base_model or model_path")
            sampler = self._add_sampler(session, body.sampling_session_seq_id, version, name)
        self.store.flush()
        return {"type": "create_sampling_session", "sampling_session_id": sampler.identifier}

    def get_sampler(self, owner: str, identifier: str) -> dict[str, Any]:
        _, sampler = self.sessions.of_sampler(identifier, owner)
        path = sampler.version.source.path
        return {"sampler_id": identifier, "base_model": sampler.base_model, "model_path": path}

    def weights_info(self, owner: str, body: schemas.WeightsInfo) -> dict[str, Any]:
        try:
            record = self.checkpoints.read(body.tinker_path, owner)[1].record
        except CommandError as error:
            raise Refused(str(error), HTTPStatus.NOT_FOUND) from error
        groups = {name: getattr(record, name) for name in MODEL_FIELDS}
        return asdict(schemas.SavedInfo(record.base_model, bool(record.rank), record.rank, **groups))

    def submit_sample(self, owner: str, body: schemas.Sample) -> dict[str, Any]:
        """Submit a request for samples. The SDK asserts that it gets one id for each."""
        session, sampler = self.sessions.of_sampler(body.sampling_session_id, owner)
        digest = digest_of("asample", write_json(body))
        with session.lock:
            future = sampler.repetitions.find(body.seq_id, digest)
            if future is None:
                if self.futures.num_pending(session.identifier) >= self.config.max_futures:
                    raise Refused(
                        f"{self.config.max_futures} results of this session are pending (max_futures); wait for some "
                        "of them before the next sample",
                        HTTPStatus.TOO_MANY_REQUESTS,
                    )
                future = self.futures.create(session.identifier, (sampler.identifier, body.seq_id), digest=digest)
                body = sampler.with_seed(body)  # which the log keeps
                content, job = write_json(body), sampler.job(future, body)
                entry = Entry(sampler.identifier, body.seq_id, "asample", digest, future.identifier, content)
                sampler.version.used_at = time.time()
                self.store.write(add_entry(entry), use_sampler(sampler.identifier, sampler.version.used_at))
                sampler.repetitions.add(body.seq_id, future)
                self.sampling_queue.put(job)
        self.store.flush()
        samples = [f"{future.identifier}-{row}" for row in range(min(body.num_samples, MAX_ROWS))]
        return {"request_id": future.identifier, "sample_sequence_ids": samples}

    def _add_sampler(self, session: Session, number: int, version: Version, base_model: str) -> Sampler:
        """Create the sampler with a number in its session, or return the one that exists."""
        with session.lock:
            sampler = session.samplers.get(number)
            if number in session.missing_samplers:
                raise Refused(
                    f"sampler {number} of the session has a base model that is not served any more; use a new "
                    "sampling_session_seq_id"
                )
            if sampler is None:
                identifier = f"{session.identifier}:sample:{number}"
                seed = f"{self.config.seed}/{number}"
                sampler = Sampler(identifier, version, base_model, self.limits[base_model], seed)
                session.samplers[number] = sampler
                source = version.source.to_json()
                self.store.write(add_sampler(session.identifier, number, base_model, source, version.used_at))
            elif sampler.version is not version:
                raise Refused(f"sampler {number} of the session has other weights; use a new sampling_session_seq_id")
            return sampler

    def _saved_version(self, text: str, owner: str) -> tuple[str, Version]:
        """Return the base model and the weights of a path. They are read when they are sampled."""
        try:
            path, saved = self.checkpoints.read(text, owner)
        except CommandError as error:
            raise Refused(str(error), HTTPStatus.NOT_FOUND) from error
        self._check_base(saved.record.base_model)
        return saved.record.base_model, self.versions.of_saved(path, saved, self.bases[saved.record.base_model])

    # -- checks -----------------------------------------------------------------------------------

    def _limits_of(self, folder: str) -> codec.Limits:
        vocabulary = self.config.settings(folder).vocabulary_size()
        return codec.Limits(self.config.max_data, self.config.context_length(folder), vocabulary or 2**31 - 1)

    def _check_base(self, name: str) -> None:
        if name not in self.bases:
            raise Refused(
                f"the base model {name} is not served; this server has {', '.join(self.bases)}. Start it with "
                f"model=[...,{name}=FOLDER] to add it"
            )

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.checkpoints.root).free / 2**30
        if free < self.config.min_free_gb:
            raise Refused(
                f"the disk of the server has {free:.1f} GB left, and it stops training below "
                f"{self.config.min_free_gb:g} GB (min_free_gb); end programs that have published weights, delete saved "
                "weights that no sampler uses (tinker checkpoint delete PATH), or start the server with a smaller "
                "max_published or another folder"
            )

    @staticmethod
    def _check_optimizer(settings: schemas.OptimizerSettings | None) -> None:
        if settings is not None and settings.type not in ("adam", "adamw"):
            raise Refused(f"optimizer_config.type={settings.type} is not supported; this server has adam (AdamW)")
