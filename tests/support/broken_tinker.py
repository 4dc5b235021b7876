"""Servers of the Tinker API with one plausible bug each; each breaks one rule of the contract.

    CAUGHT_BY[StepsOnTheRest]            # the name of the rule that fails
    with running_twin(StepsOnTheRest, folder) as target: ...

All are the real service with one thing replaced: the routes (subclasses of `App`) or the worker (subclasses of
`ServedWorker`). Most of the bugs were in released servers.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from camshaft.config.engine import LoRAConfig
from camshaft.contracts.tinker.harness import Target
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import StepHyperparameters
from camshaft.http import Reply, Request, json_reply
from camshaft.roles.served import ServedModel, ServedWorker
from camshaft.rollout import SamplingParams
from camshaft.seat import Seat
from camshaft.service import codec, keys
from camshaft.service.app import App
from camshaft.service.errors import CommandError
from camshaft.wire import messages
from support.tinker_clients import BASE, RunningServer, running_server
from support.tiny import tiny_folder

GAP_SECONDS, POLL_SECONDS, POLL_LIMIT = 4.0, 0.5, 2.0

# -- routes ----------------------------------------------------------------------------------------


class Routes(App):
    """Routes with short polls, and methods that change a request or a reply."""

    options: Mapping[str, Any] = {}
    """Options of the server."""
    forgets: str | None = None
    """Pattern of the files of the server that a restart deletes."""
    seconds = POLL_SECONDS

    def __init__(self, service: Any, keys: Any):
        super().__init__(service, keys, self.seconds)
        self.seen: dict[Any, Any] = {}

    def answer(self, request: Request) -> Reply:
        route = request.path.removeprefix("/api/v1/")
        if route == "forward_backward":
            message = messages.ForwardBackwardRequest.FromString(request.body)
            self.edit_training(message)
            request = request._replace(body=message.SerializeToString())
        elif request.method == "POST":
            content = json.loads(request.body or b"{}")
            self.edit(route, content)
            request = request._replace(body=json.dumps(content).encode())
        return self.edit_reply(route, request, super().answer(request))

    def edit(self, route: str, content: dict[str, Any]) -> None:
        """Change a JSON request."""

    def edit_training(self, message: Any) -> None:
        """Change a request of forward_backward."""

    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        """Return the reply, or another one."""
        return reply


def content_of(reply: Reply) -> dict[str, Any]:
    """Return the content of a JSON reply, and nothing for a message."""
    assert isinstance(reply.body, bytes)
    return json.loads(reply.body) if reply.kind == "application/json" else {}


class HasNoConfig(Routes):
    """Answer the first request of the SDK with 404."""

    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        return json_reply({"detail": "Not Found"}, 404) if route == "client/config" else reply


class CreatesOnce(Routes):
    """Refuse the creation of a model that has been created, also for a repeated request."""

    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        if route == "create_model" and self.seen.setdefault(request.body, reply) is not reply:
            return json_reply({"detail": "the model exists already"}, 422)
        return reply


class IsStrict(Routes):
    """Refuse unknown fields."""

    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        return json_reply({"detail": "extra inputs"}, 422) if b"future_field" in request.body else reply


class NamesNoField(Routes):
    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        return json_reply({"detail": "validation error"}, 422) if "is missing" in str(reply.body) else reply


class OldOptionsWin(Routes):
    def edit_training(self, message: Any) -> None:
        for name, value in message.loss_fn_config.items():
            message.loss_fn_config_v2[name].number = value


class ChecksKeysAtSubmission(Routes):
    """Let anybody fetch results."""

    def refuse(self, request: Request) -> Reply | None:
        return None if request.path.endswith("retrieve_future") else super().refuse(request)

    def answer(self, request: Request) -> Reply:
        if request.path.endswith("retrieve_future"):
            request = request._replace(headers={**request.headers, "X-API-Key": str(self.keys.own_key)})
        return super().answer(request)


class HasOneOwner(Routes):
    """Let everything belong to all keys."""

    def answer(self, request: Request) -> Reply:
        return super().answer(request._replace(headers={**request.headers, "X-API-Key": str(self.keys.own_key)}))


class ChoosesIds(Routes):
    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        content = content_of(reply)
        is_created = route == "retrieve_future" and content.get("type") == "create_model"
        return json_reply({**content, "model_id": "model-7f3a"}) if is_created else reply


class PollsLong(Routes):
    seconds = POLL_LIMIT + 1


class AnswersConflict(Routes):
    """Refuse mistakes with a status that the SDK repeats for five minutes."""

    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        return replace(reply, status=409) if reply.status == 422 else reply


class HasOtherThresholds(Routes):
    def edit_training(self, message: Any) -> None:
        if message.loss_fn == "ppo" and not message.loss_fn_config_v2:
            message.loss_fn_config_v2["clip_low_threshold"].number = 0.9
            message.loss_fn_config_v2["clip_high_threshold"].number = 1.1


class DropsUnknownInputs(Routes):
    def edit_training(self, message: Any) -> None:
        for datum in message.data:
            for name in set(datum.loss_fn_inputs) - {"target_tokens", "weights", "logprobs", "advantages"}:
                del datum.loss_fn_inputs[name]


class RunsInOrderOfArrival(Routes):
    """Number the commands of a model when they arrive. Repeated ones keep their number."""

    def edit(self, route: str, content: dict[str, Any]) -> None:
        if "seq_id" in content and "model_id" in content:
            content["seq_id"] = self.number(content["model_id"], (content["seq_id"], json.dumps(content)), True)

    def edit_training(self, message: Any) -> None:
        message.seq_id = self.number(message.model_id, (message.seq_id, message.SerializeToString()), False)

    def number(self, model_id: str, body: Any, is_step: bool) -> int:
        numbers = self.seen.setdefault(model_id, {})
        return numbers.setdefault(body, len(numbers) + 1)


class RunsAgain(RunsInOrderOfArrival):
    """Execute a command that is sent again once more."""

    def number(self, model_id: str, body: Any, is_step: bool) -> int:
        counter = self.seen.setdefault(model_id, itertools.count(1))
        return next(counter)


class AddsAgain(RunsInOrderOfArrival):
    """Add the gradients of a forward_backward that is sent again once more."""

    def number(self, model_id: str, body: Any, is_step: bool) -> int:
        numbers = self.seen.setdefault(model_id, {})
        key = body if is_step else (body, len(numbers))
        return numbers.setdefault(key, len(numbers) + 1)


class SamplesAgain(Routes):
    def edit(self, route: str, content: dict[str, Any]) -> None:
        if route == "asample":
            content["seq_id"] = self.seen["samples"] = self.seen.get("samples", 0) + 1


class FirstBodyAnswers(Routes):
    """Answer a number that was used with the promise of its first command, whatever the body is."""

    def answer(self, request: Request) -> Reply:
        if not request.path.endswith("forward_backward"):
            return super().answer(request)
        message = messages.ForwardBackwardRequest.FromString(request.body)
        key = message.model_id, message.seq_id
        if key not in self.seen:
            self.seen[key] = super().answer(request)
        return self.seen[key]


class ForgetsSentResults(Routes):
    """Delete a result when it is sent, and then answer that the promise is gone."""

    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        if route != "retrieve_future" or reply.status != 200:
            return reply
        name = json.loads(request.body)["request_id"]
        return reply if self.seen.setdefault(name, reply) is reply else json_reply({"detail": "gone"}, 410)


class WaitsForEver(Routes):
    options: Mapping[str, Any] = {"gap_timeout": 1e6}


class StepsOnTheRest(Routes):
    """Do not let a failed chunk fail the step."""

    def edit_training(self, message: Any) -> None:
        for datum in message.data:
            targets = np.frombuffer(datum.loss_fn_inputs["target_tokens"].dense, "<i8")
            message.forward_only |= bool((targets > 1000).any())


class StaysPoisoned(Routes):
    """Refuse all commands of a model after one has failed."""

    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        content = content_of(reply)
        if "request_id" in content and "model_id" in content:
            if content["model_id"] in self.seen:
                return json_reply({"detail": "the model is in a failed state"}, 422)
            self.seen[content["request_id"]] = content["model_id"]
        if route == "retrieve_future" and "optim_step changed no weight" in content.get("error", ""):
            self.seen[self.seen[json.loads(request.body)["request_id"]]] = True
        return reply


class IgnoresSigns(Routes):
    """Sample with the absolute temperature."""

    def edit(self, route: str, content: dict[str, Any]) -> None:
        if (settings := content.get("sampling_params")) and "temperature" in settings:
            settings["temperature"] = abs(settings["temperature"])


class ChangesNames(Routes):
    """Replace what cannot be in a name, so that different names are the same one."""

    def edit(self, route: str, content: dict[str, Any]) -> None:
        if route == "save_weights":
            content["path"] = content["path"].replace("/", "_").replace("..", "_")


class OverwritesInPlace(Routes):
    def edit(self, route: str, content: dict[str, Any]) -> None:
        if route == "save_weights":
            content["overwrite"] = True


class SamplesTheBaseOfSavedWeights(Routes):
    def edit(self, route: str, content: dict[str, Any]) -> None:
        if route == "create_sampling_session" and content.pop("model_path", None):
            content["base_model"] = BASE


class IgnoresTimeToLive(Routes):
    def edit(self, route: str, content: dict[str, Any]) -> None:
        content.pop("ttl_seconds", None)


class DeletesNothing(Routes):
    """Confirm a deletion without one."""

    def answer(self, request: Request) -> Reply:
        return json_reply({}) if request.method == "DELETE" else super().answer(request)


class KeptTurns(dict[str, Any]):
    """Jobs by session, of which the first one keeps its turn until it has no jobs."""

    def pop(self, session: str, *_: Any) -> Any:
        return self[session]


class KeepsTurns(Routes):
    """Execute all commands of a client before those of the next one."""

    def __init__(self, service: Any, keys: Any):
        super().__init__(service, keys)
        service.queue._jobs = KeptTurns()


class ForgetsCommands(Routes):
    """Keep saved weights only."""

    forgets = "log.sqlite3*"


class ForgetsSamplers(ForgetsCommands):
    """Keep saved weights, and no sampler."""


class PollsWith200(Routes):
    """Answer a poll of a pending promise with the other status that the SDK knows. No rule is broken."""

    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        return replace(reply, status=200) if route == "retrieve_future" and reply.status == 408 else reply


class RefusesAtOnce(Routes):
    """Refuse commands that would fail, and then wait for others with their numbers. No rule is broken."""

    def answer(self, request: Request) -> Reply:
        if request.path.endswith("forward_backward"):
            message = messages.ForwardBackwardRequest.FromString(request.body)
            try:
                codec.read_rows(message, codec.read_loss(message)[0], self.service.limits[BASE])
            except CommandError as error:
                return json_reply({"detail": str(error)}, 422)
            if not message.forward_only:
                self.seen[message.model_id] = True
        if request.path.endswith("optim_step") and not self.seen.pop(json.loads(request.body)["model_id"], False):
            return json_reply({"detail": "there are no gradients"}, 422)
        return super().answer(request)


class StepsWithoutEffect(RefusesAtOnce):
    """Let a step without gradients succeed, which changes no weight. No rule is broken."""

    def answer(self, request: Request) -> Reply:
        self.seen[json.loads(request.body)["model_id"] if request.path.endswith("optim_step") else ""] = True
        return super().answer(request)

    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        is_empty = "found no gradient" in content_of(reply).get("error", "")
        return json_reply({"type": "optim_step", "metrics": {"grad_norm": 0.0}}) if is_empty else reply


class RefusesScores(Routes):
    """Refuse log-probs of prompts, as a server may."""

    def edit_reply(self, route: str, request: Request, reply: Reply) -> Reply:
        if route == "asample" and json.loads(request.body).get("prompt_logprobs"):
            return json_reply({"detail": "prompt_logprobs is not supported"}, 422)
        return reply


# -- the worker ------------------------------------------------------------------------------------


class TrainsOther(ServedWorker):
    """Train on other rows, with another loss or with other options."""

    def forward_backward(
        self, model_id: str, rows: DataProto, loss: str, options: Mapping[str, float], forward_only: bool
    ) -> DataProto:
        rows, loss, options = self.edit(rows, loss, dict(options))
        return super().forward_backward(model_id, rows, loss, options, forward_only)

    def edit(self, rows: DataProto, loss: str, options: dict[str, float]) -> tuple[DataProto, str, dict[str, float]]:
        return self.edit_rows(rows), loss, options

    def edit_rows(self, rows: DataProto) -> DataProto:
        return rows


def scaled(rows: DataProto, factor: float) -> DataProto:
    """Return rows whose loss is scaled, if it is linear in the weights or advantages."""
    names = [name for name in ("weights", "advantages") if name in rows]
    return rows.with_columns(**{name: rows.ragged(name).map(lambda values: values * factor) for name in names})


class ShiftsTargets(TrainsOther):
    """Take the inputs that follow as targets."""

    def edit_rows(self, rows: DataProto) -> DataProto:
        return rows.with_columns(targets=rows.ragged("input_ids"))


class Averages(TrainsOther):
    def edit_rows(self, rows: DataProto) -> DataProto:
        return scaled(rows, 1 / int(rows.ragged("loss_mask").values.sum()))


class DividesByDatums(TrainsOther):
    def edit_rows(self, rows: DataProto) -> DataProto:
        return scaled(rows, 1 / len(rows))


class TakesWeightsAsMask(TrainsOther):
    def edit_rows(self, rows: DataProto) -> DataProto:
        if "weights" not in rows:
            return rows
        return rows.with_columns(weights=rows.ragged("weights").map(lambda values: (values != 0).float()))


class HasNoRatio(TrainsOther):
    """Take importance_sampling as the policy gradient of samples of the current model."""

    def edit(self, rows: DataProto, loss: str, options: dict[str, float]) -> tuple[DataProto, str, dict[str, float]]:
        if loss != "importance_sampling":
            return rows, loss, options
        return rows.with_columns(weights=rows.ragged("advantages")), "cross_entropy", options


class KeepsGradientOfClip(TrainsOther):
    """Take cispo as ppo."""

    def edit(self, rows: DataProto, loss: str, options: dict[str, float]) -> tuple[DataProto, str, dict[str, float]]:
        return rows, "ppo" if loss == "cispo" else loss, options


class HasNoHalf(TrainsOther):
    """Take dro without the factor 1/2."""

    def edit(self, rows: DataProto, loss: str, options: dict[str, float]) -> tuple[DataProto, str, dict[str, float]]:
        return rows, loss, {name: value * (2 if name == "beta" else 1) for name, value in options.items()}


class HasRatiosOfTokens(TrainsOther):
    """Take gspo as ppo."""

    def edit(self, rows: DataProto, loss: str, options: dict[str, float]) -> tuple[DataProto, str, dict[str, float]]:
        return rows, "ppo" if loss == "gspo" else loss, options


class ClampsOverflows(TrainsOther):
    """Train on a datum with an infinite ratio as if it were a large one."""

    def edit_rows(self, rows: DataProto) -> DataProto:
        if "logprobs" not in rows:
            return rows
        return rows.with_columns(logprobs=rows.ragged("logprobs").map(lambda values: values.clamp(min=-20)))


class AlwaysTrains(ServedWorker):
    """Ignore forward_only."""

    def forward_backward(
        self, model_id: str, rows: DataProto, loss: str, options: Mapping[str, float], forward_only: bool
    ) -> DataProto:
        return super().forward_backward(model_id, rows, loss, options, False)


class ClearsAtEachCall(ServedWorker):
    """Train on the last chunk only."""

    def forward_backward(
        self, model_id: str, rows: DataProto, loss: str, options: Mapping[str, float], forward_only: bool
    ) -> DataProto:
        if not forward_only:
            with self.models[model_id].engine.train_mode():
                self._clear(self.models[model_id])
        return super().forward_backward(model_id, rows, loss, options, forward_only)


class ReturnsOther(ServedWorker):
    """Return other log-probs."""

    def forward_backward(
        self, model_id: str, rows: DataProto, loss: str, options: Mapping[str, float], forward_only: bool
    ) -> DataProto:
        out = super().forward_backward(model_id, rows, loss, options, forward_only)
        return out.with_columns(log_probs=self.edit_log_probs(out.ragged("log_probs")))

    def edit_log_probs(self, log_probs: Ragged) -> Ragged:
        raise AssertionError


class AlignsRight(ReturnsOther):
    """Cut the log-probs of shorter datums at the right end."""

    def edit_log_probs(self, log_probs: Ragged) -> Ragged:
        longest = int(log_probs.lengths.max())
        return Ragged.from_rows([row if len(row) == longest else row.roll(1) for row in log_probs.rows()])


class ReturnsHalfPrecision(ReturnsOther):
    def edit_log_probs(self, log_probs: Ragged) -> Ragged:
        return log_probs.map(lambda values: values.half().float())


class StepsOther(ServedWorker):
    """Step with other hyperparameters."""

    def optimizer_step(self, model_id: str, hyperparameters: StepHyperparameters) -> Any:
        return super().optimizer_step(model_id, self.edit(self.models[model_id], hyperparameters))

    def edit(self, model: ServedModel, hyperparameters: StepHyperparameters) -> StepHyperparameters:
        raise AssertionError


class KeepsFirstBetas(StepsOther):
    betas: tuple[float, float] | None = None

    def edit(self, model: ServedModel, hyperparameters: StepHyperparameters) -> StepHyperparameters:
        self.betas = self.betas or hyperparameters.betas
        return replace(hyperparameters, betas=self.betas)


class ClipsEachCall(StepsOther):
    """Bound the norm by as many times the limit as there were calls."""

    def edit(self, model: ServedModel, hyperparameters: StepHyperparameters) -> StepHyperparameters:
        return replace(hyperparameters, clip_grad=(hyperparameters.clip_grad or 0.0) * model.num_calls)


class KeepsGradients(ServedWorker):
    """Do not clear gradients after a step."""

    def _clear(self, model: ServedModel) -> None: ...


class CreatesOther(ServedWorker):
    def create(self, model_id: str, base: str, lora: LoRAConfig | None, seed: int) -> Seat:
        return super().create(model_id, base, None if lora is None else self.edit(lora), seed)

    def edit(self, lora: LoRAConfig) -> LoRAConfig:
        raise AssertionError


class HasNoAlpha(CreatesOther):
    def edit(self, lora: LoRAConfig) -> LoRAConfig:
        return lora.model_copy(update={"alpha": 1e-9})


class IgnoresSeeds(CreatesOther):
    count = 0

    def edit(self, lora: LoRAConfig) -> LoRAConfig:
        self.count += 1
        return lora.model_copy(update={"seed": self.count})


class IgnoresGroups(CreatesOther):
    def edit(self, lora: LoRAConfig) -> LoRAConfig:
        return lora.model_copy(update={"train_attn": True, "train_mlp": True})


class SharesEngine(ServedWorker):
    """Train all models with one engine, so that gradients of clients mix."""

    def create(self, model_id: str, base: str, lora: LoRAConfig | None, seed: int) -> Seat:
        if not self.models:
            return super().create(model_id, base, lora, seed)
        self.models[model_id] = next(iter(self.models.values()))
        return self.models[model_id].engine.seat


class LoadsIntoTheSource(SharesEngine):
    """Create a model from saved weights in the engine of the one that was saved."""


class LosesMoments(ServedWorker):
    def load(self, model_id: str, folder: str, with_optimizer: bool) -> None:
        return super().load(model_id, folder, False)


class SamplesOther(ServedWorker):
    """Sample other versions, with other options or seeds."""

    newest: str | None = None
    """Last published version."""

    def publish(self, model_id: str, version: str) -> None:
        self.newest = version
        return super().publish(model_id, version)

    def sample(self, base: str, version: str, prompts: Ragged, sampling: SamplingParams, seeds: torch.Tensor) -> Any:
        return super().sample(base, self.choose(version), prompts, self.edit(sampling), self.edit_seeds(seeds))

    def choose(self, version: str) -> str:
        return version

    def edit(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def edit_seeds(self, seeds: torch.Tensor) -> torch.Tensor:
        return seeds


class SamplesNewestWeights(SamplesOther):
    def choose(self, version: str) -> str:
        return self.newest or version


class SamplesBaseWithAdapter(SamplesOther):
    bases: frozenset[str] = frozenset()

    def publish_base(self, base: str, version: str) -> None:
        self.bases |= {version}
        return super().publish_base(base, version)

    def choose(self, version: str) -> str:
        return self.newest or version if version in self.bases else version


class PublishesTheBase(ServedWorker):
    """Publish the weights without the adapter."""

    def publish(self, model_id: str, version: str) -> None:
        return self.publish_base(self.models[model_id].base, version)


class SeedsTheBatch(SamplesOther):
    """Derive the random numbers of a row from its place in the batch."""

    def edit_seeds(self, seeds: torch.Tensor) -> torch.Tensor:
        return seeds[0] + torch.arange(len(seeds))


class AlwaysStopsAtTheEnd(SamplesOther):
    def edit(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, ignore_eos=False)


class ForgetsTemperature(SamplesOther):
    """Return log-probs as if the temperature were 1."""

    def sample(self, base: str, version: str, prompts: Ragged, sampling: SamplingParams, seeds: torch.Tensor) -> Any:
        out = super().sample(base, version, prompts, sampling, seeds)
        log_probs = out.ragged("rollout_log_probs").map(lambda values: values * sampling.temperature)
        return out.with_columns(rollout_log_probs=log_probs)


class ScoresOther(ServedWorker):
    """Return other log-probs of given tokens."""

    def score(
        self,
        base: str,
        version: str,
        prompts: Ragged,
        top_k: int,
        candidates: Ragged | None,
        sampling: SamplingParams | None,
    ) -> Any:
        scores = super().score(base, self.choose(base, version), prompts, top_k, candidates, sampling)
        return scores.with_columns(**{name: self.edit(name, scores.ragged(name)) for name in scores.columns})

    def choose(self, base: str, version: str) -> str:
        return version

    def edit(self, name: str, column: Ragged) -> Ragged:
        return column


def shifted(column: Ragged) -> Ragged:
    return Ragged.from_rows([row.roll(-1, 0) for row in column.rows()])


class ScoresTheNextToken(ScoresOther):
    """Shift the log-probs of a prompt by one position."""

    def edit(self, name: str, column: Ragged) -> Ragged:
        return shifted(column) if name == "log_probs" else column


class RanksTheNextToken(ScoresOther):
    """Shift the most likely tokens of a prompt by one position."""

    def edit(self, name: str, column: Ragged) -> Ragged:
        return shifted(column) if name in ("top_tokens", "top_log_probs") else column


class ScoresCandidatesTooEarly(ScoresOther):
    """Take row i of the candidates for position i of the prompt."""

    def edit(self, name: str, column: Ragged) -> Ragged:
        return shifted(column) if name == "candidate_log_probs" else column


class RanksThePrompt(ScoresOther):
    """Return the most likely tokens of the beginning of the prompt for the samples."""

    def edit(self, name: str, column: Ragged) -> Ragged:
        return Ragged.from_rows([row.roll(5, 0) for row in column.rows()]) if name.startswith("top") else column


class ScoresTheBase(ScoresOther):
    """Score with the weights of the base model, as without the adapter."""

    def choose(self, base: str, version: str) -> str:
        self.publish_base(base, "base")
        return "base"


CAUGHT_BY: dict[type[App] | type[ServedWorker], str] = {
    HasNoConfig: "handshake",
    CreatesOnce: "requests tolerate lost answers",
    IsStrict: "unknown fields are ignored",
    NamesNoField: "missing fields are named",
    OldOptionsWin: "newer loss options win",
    ChecksKeysAtSubmission: "foreign keys are refused",
    HasOneOwner: "keys separate users",
    ChoosesIds: "ids have the form of the sdk",
    PollsLong: "polls end in time",
    AnswersConflict: "mistakes are final",
    ShiftsTargets: "log probs are those of the targets",
    AlignsRight: "answers are aligned with datums",
    Averages: "cross entropy",
    TakesWeightsAsMask: "weights of any sign",
    HasNoRatio: "importance sampling",
    HasOtherThresholds: "ppo",
    KeepsGradientOfClip: "cispo",
    HasNoHalf: "dro",
    HasRatiosOfTokens: "gspo",
    DividesByDatums: "losses are sums",
    ReturnsHalfPrecision: "custom losses in two passes",
    ClearsAtEachCall: "gradients add up",
    AlwaysTrains: "forward only changes nothing",
    KeepsFirstBetas: "updates are those of adamw",
    ClipsEachCall: "clipping is of the sum",
    KeepsGradients: "steps need gradients",
    ClampsOverflows: "infinite gradients change nothing",
    DropsUnknownInputs: "invalid settings are errors",
    HasNoAlpha: "adapters begin at the base and learn",
    IgnoresSeeds: "adapter seeds reproduce",
    IgnoresGroups: "adapter groups select layers",
    RunsInOrderOfArrival: "commands run in the order of their numbers",
    RunsAgain: "repeated commands run once",
    SamplesAgain: "repeated samples are one request",
    FirstBodyAnswers: "numbers have one body",
    ForgetsSentResults: "lost answers are fetched again",
    AddsAgain: "faults do not change weights",
    WaitsForEver: "gaps end",
    StepsOnTheRest: "failed chunks fail the step",
    StaysPoisoned: "models are usable after failures",
    ForgetsTemperature: "log probs of samples are exact",
    SeedsTheBatch: "seeds decide samples",
    AlwaysStopsAtTheEnd: "stops end a sample",
    SamplesNewestWeights: "samplers keep their version",
    PublishesTheBase: "samples are of the trained model",
    SamplesBaseWithAdapter: "base models are not trained",
    ScoresTheNextToken: "prompts have log probs",
    RanksTheNextToken: "prompts have the most likely tokens",
    ScoresCandidatesTooEarly: "candidates of prompts have log probs",
    RanksThePrompt: "samples have the most likely tokens",
    ScoresTheBase: "log probs of prompts and samples agree",
    IgnoresSigns: "invalid prompts are errors",
    LosesMoments: "states are restored",
    OverwritesInPlace: "saved weights do not change",
    ChangesNames: "names are no paths",
    LoadsIntoTheSource: "models are created from saved weights",
    SamplesTheBaseOfSavedWeights: "saved samplers are reusable",
    DeletesNothing: "checkpoints are listed and deleted",
    IgnoresTimeToLive: "checkpoints expire",
    SharesEngine: "clients are isolated",
    KeepsTurns: "clients take turns",
    ForgetsCommands: "restarts lose nothing",
    ForgetsSamplers: "restarts keep samplers",
}
"""Rule that each server breaks."""

LOSSES = ("cross entropy", "weights of any sign", "importance sampling", "ppo", "cispo", "dro", "gspo")
ALSO_BREAKS: dict[type[App] | type[ServedWorker], set[str]] = {
    HasNoConfig: {"unknown fields are ignored"},
    ChecksKeysAtSubmission: {"keys separate users"},
    ChoosesIds: {
        "requests tolerate lost answers",
        "unknown fields are ignored",
        "newer loss options win",
        "foreign keys are refused",
        "keys separate users",
        "polls end in time",
        "mistakes are final",
    },
    AnswersConflict: {"missing fields are named"},
    AlignsRight: {*LOSSES, "log probs are those of the targets", "custom losses in two passes"},
    Averages: {*LOSSES, "losses are sums", "custom losses in two passes"},
    TakesWeightsAsMask: {"custom losses in two passes"},
    DividesByDatums: {*LOSSES, "custom losses in two passes"},
    ReturnsHalfPrecision: {*LOSSES, "log probs are those of the targets", "answers are aligned with datums"},
    ClearsAtEachCall: {"clipping is of the sum"},
    AlwaysTrains: {
        "gradients add up",
        "updates are those of adamw",
        "steps need gradients",
        "infinite gradients change nothing",
    },
    KeepsGradients: {"gradients add up", "updates are those of adamw", "infinite gradients change nothing"},
    HasNoAlpha: {"adapter seeds reproduce", "adapter groups select layers"},
    RunsInOrderOfArrival: {"numbers have one body", "gaps end"},
    RunsAgain: {
        "commands run in the order of their numbers",
        "numbers have one body",
        "faults do not change weights",
        "gaps end",
    },
    ForgetsSentResults: {
        "repeated commands run once",
        "repeated samples are one request",
        "faults do not change weights",
        "gaps end",
    },
    AddsAgain: {
        "commands run in the order of their numbers",
        "repeated commands run once",
        "numbers have one body",
        "gaps end",
    },
    StepsOnTheRest: {"models are usable after failures"},
    StaysPoisoned: {"gaps end", "failed chunks fail the step"},
    SeedsTheBatch: {"samplers keep their version"},
    SamplesNewestWeights: {"base models are not trained"},
    PublishesTheBase: {"samplers keep their version"},
    ScoresTheNextToken: {"log probs of prompts and samples agree"},
    RanksTheNextToken: {"samples have the most likely tokens"},
    RanksThePrompt: {"prompts have the most likely tokens"},
    LoadsIntoTheSource: {"clients are isolated", "restarts lose nothing"},
    SharesEngine: {"models are created from saved weights", "restarts lose nothing"},
    ForgetsCommands: {"restarts keep samplers"},
    ForgetsSamplers: {"restarts lose nothing"},
}
"""Further rules of the same topic that a server may break. The others break no other one."""


@contextlib.contextmanager
def running_twin(kind: type[App] | type[ServedWorker], folder: Path, **server_options: Any) -> Iterator[Target]:
    """Run a server with routes or a worker of another class. Its worker is in this process, unless it has ranks."""
    app = kind if issubclass(kind, App) else Routes
    worker = kind if issubclass(kind, ServedWorker) else ServedWorker if server_options.get("ranks", 1) == 1 else None
    options = {"gap_timeout": GAP_SECONDS, **(app.options if issubclass(app, Routes) else {}), **server_options}
    other_key = keys.add_key(folder / "keys.txt", "other")
    with contextlib.ExitStack() as stack:

        def start(port: int) -> RunningServer:
            return stack.enter_context(running_server(folder, folder / "keys.txt", app, worker, port=port, **options))

        def restart() -> None:
            stack.close()
            if issubclass(app, Routes) and app.forgets is not None:
                for path in (folder / "served").glob(app.forgets):
                    path.unlink()
            start(server.port)

        server = start(0)
        yield Target(
            server.url,
            server.key,
            BASE,
            str(tiny_folder(tie_embeddings=False)),
            gap_timeout=GAP_SECONDS,
            poll_limit=POLL_LIMIT,
            other_key=other_key,
            restart=restart,
        )
