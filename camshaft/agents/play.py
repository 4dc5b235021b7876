"""Play episodes over any rollout: the policy and the environments take turns until each episode has ended.

    limits = Limits(max_prompt=512, max_response=2048, max_turns=8)
    episodes = play(rollout, Host({"": HigherLower}), questions, Bridge(tokenizer), limits, SamplingParams(2048))

By default, answers are generated in waves, one call of the rollout for all episodes that still run. With the schedule
"stream", an episode whose environment has answered joins the batch that is being generated. Up to rounding, the tokens
of an episode depend only on its seed and its history, and neither on the schedule nor on other episodes. Where the
numbers of a rollout are a function of seed and position (`RolloutCapabilities.continues_rows`), all answers use the
seed of the row. Other rollouts get a seed of its own for each answer. Penalties and stop strings apply to the current
answer. A rollout that keeps rows (`RolloutCapabilities.keeps_rows`) computes each token of an episode once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from camshaft.agents.bridge import Bridge
from camshaft.agents.calls import PolicyAnswer
from camshaft.agents.environment import Environments, Fault, Message, Start, Turn
from camshaft.agents.episode import Episode
from camshaft.errors import RolloutError
from camshaft.progress import counted
from camshaft.rewards.environments import episode_arguments, last_answer
from camshaft.rewards.messages import Sample
from camshaft.rollout import Answer, BaseRollout, SamplingParams, Stream, WaveRow, generate_wave, open_stream
from camshaft.subprocesses import POLL_SECONDS

Schedule = Literal["waves", "stream"]
"""Order of answers: all episodes answer at the same time, or each as soon as its environment has answered."""

JOIN_SECONDS = 0.005
"""Interval at which the results of environments are looked for while answers are generated."""

TRUNCATED = "...(truncated)..."
"""Text in place of the part of an environment's text that is left out."""


class Question(NamedTuple):
    """A prompt for which an episode is played."""

    messages: Sequence[Message]
    start: Start
    sampling_seed: int
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the functions that the policy may call."""
    is_scored: bool = False
    """True if the environment has a final score."""


@dataclass(frozen=True)
class Limits:
    """Limits of an episode, in tokens unless noted."""

    max_prompt: int
    """Maximum length of the prompt after `reset`."""
    max_response: int
    """Maximum length of everything behind the prompt."""
    max_turns: int | None = None
    """Maximum number of answers."""
    max_turn_length: int | None = None
    """Maximum length of an answer."""
    max_text: int | None = None
    """Length from which a text of the environment is truncated."""
    truncate_side: Literal["left", "middle", "right"] = "middle"
    """Part of a truncated text that is kept: its beginning (left), its end (right) or both (middle)."""
    timeout: float | None = None
    """Maximum time of all calls of the environment, in seconds."""


def play(
    rollout: BaseRollout,
    environments: Environments,
    questions: Sequence[Question],
    bridge: Bridge,
    limits: Limits,
    sampling: SamplingParams,
    schedule: Schedule = "waves",
) -> list[Episode]:
    """Play one episode for each question, and return them in the same order.

    `max_tokens` of `sampling` is replaced by what `limits` leaves for an answer.
    """
    game = _Game(rollout, environments, questions, bridge, limits, sampling)
    if schedule == "waves":
        game.play_waves()
    else:
        with open_stream(rollout) as stream:
            game.play_stream(stream)
    return game.end()


class _Game:
    """Episodes in progress, with the arguments of `play`."""

    def __init__(
        self,
        rollout: BaseRollout,
        environments: Environments,
        questions: Sequence[Question],
        bridge: Bridge,
        limits: Limits,
        sampling: SamplingParams,
    ):
        self.rollout, self.environments, self.bridge = rollout, environments, bridge
        self.questions, self.limits, self.sampling = questions, limits, sampling
        self.episodes = [Episode(list(question.messages)) for question in questions]
        self.was_cut: dict[int, bool] = {}
        """Whether a limit has ended the last answer of an episode."""

    def play_waves(self) -> None:
        """Let all episodes answer at the same time, and then their environments."""
        turns = self.environments.reset({number: question.start for number, question in enumerate(self.questions)})
        for number in range(len(self.questions)):
            self._begin(number, turns[number])
        while running := [number for number, episode in enumerate(self.episodes) if episode.stop_reason is None]:
            answers = generate_wave(self.rollout, [self._row(number) for number in running])
            sent = {number: self._add(number, answer) for number, answer in zip(running, answers, strict=True)}
            for number, turn in self.environments.step(sent).items():
                self._continue(number, turn)
            self.rollout.close_rows(number for number in running if self.episodes[number].stop_reason is not None)

    def play_stream(self, stream: Stream) -> None:
        """Let each episode answer as soon as its environment has, while others are generated or wait."""
        self.environments.submit({number: question.start for number, question in enumerate(self.questions)})
        acting, answering = set(range(len(self.questions))), set[int]()  # environments and policy
        with counted(len(self.questions), "episodes") as work:
            while acting or answering:
                turns = self.environments.take(0.0 if answering else POLL_SECONDS) if acting else {}
                for number, turn in turns.items():
                    (self._continue if self.episodes[number].turns else self._begin)(number, turn)
                    if self.episodes[number].stop_reason is None:
                        row = self._row(number)
                        stream.put(number, row.tokens, row.sampling, row.seed)
                        answering.add(number)
                    else:
                        stream.close(number)
                        work.done += 1
                acting -= turns.keys()
                answers = stream.take(JOIN_SECONDS if acting else POLL_SECONDS) if answering else []
                sent = {int(answer.row_id): self._add(int(answer.row_id), answer) for answer in answers}
                self.environments.submit(sent)
                acting |= sent.keys()
                answering -= sent.keys()

    def end(self) -> list[Episode]:
        """Read the scores, and return the episodes."""
        self._add_scores()
        self._judge()
        self.environments.end(range(len(self.questions)))
        return self.episodes

    def _add_scores(self) -> None:
        """Add the final scores of environments to the last tokens of the episodes."""
        rows = enumerate(zip(self.questions, self.episodes, strict=True))
        scored = [number for number, (question, episode) in rows if question.is_scored and episode.turns]
        scored = [number for number in scored if self.episodes[number].fault is None]
        for number, score in self.environments.score(scored).items() if scored else ():
            episode = self.episodes[number]
            if isinstance(score, Fault):
                episode.fault, episode.stop_reason = score, "error"
            else:
                episode.seconds += score.seconds
                episode.add_reward(score.reward)

    def _judge(self) -> None:
        """Call the reward functions that take environments."""
        rows = enumerate(zip(self.questions, self.episodes, strict=True))
        ended = [(number, *row) for number, row in rows if row[1].turns and row[1].fault is None]
        samples = {number: _sample(question, episode) for number, question, episode in ended}
        for number, outcomes in self.environments.judge(samples).items() if samples else ():
            self.episodes[number].outcomes = outcomes
            self.episodes[number].seconds += sum(outcome.seconds for outcome in outcomes)

    def _begin(self, number: int, turn: Turn | Fault) -> None:
        """Set the prompt of an episode, or end the episode."""
        episode = self.episodes[number]
        if isinstance(turn, Fault):
            episode.fault, episode.stop_reason = turn, "error"
            return
        episode.seconds += turn.seconds
        episode.messages = turn.prompt(episode.messages)
        episode.prompt = self.bridge.start(episode.messages, self.questions[number].tools)
        if len(episode.prompt) > self.limits.max_prompt:
            episode.stop_reason = "prompt"

    def _add(self, number: int, sampled: Answer) -> str | PolicyAnswer:
        """Append an answer to an episode, and return what its environment receives."""
        if not sampled.tokens:
            raise RolloutError("the rollout returned an empty answer; increase rollout.max_model_len")
        episode = self.episodes[number]
        episode.num_recomputed += episode.num_computed - sampled.num_cached
        answer = self._add_answer(episode, sampled.tokens, sampled.log_probs, self.questions[number].tools)
        episode.num_computed = len(episode.prompt) + len(episode.tokens) - 1  # all but the last sampled token
        self.was_cut[number] = sampled.reason == "length"
        return answer

    def _row(self, number: int) -> WaveRow:
        """Return the row of the next answer of an episode."""
        episode, question = self.episodes[number], self.questions[number]
        sampling = replace(self.sampling, max_tokens=self._answer_limit(episode))
        return WaveRow(
            number, episode.prompt + episode.tokens, sampling, question.sampling_seed, position=len(episode.tokens)
        )

    def _add_answer(
        self, episode: Episode, tokens: list[int], log_probs: list[float], tools: Sequence[dict[str, Any]]
    ) -> str | PolicyAnswer:
        """Append an answer, and return what the environment receives."""
        if not tools:
            text = self.bridge.decode(tokens)
            episode.add_answer(tokens, log_probs, text)
            return text
        parsed = self.bridge.parser.parse(tokens, episode.prompt + episode.tokens, tools)
        calls = [call.message(episode.turns, number) for number, call in enumerate(parsed.calls)]
        parts = {"tool_calls": calls} if calls else {}
        thinking = {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
        answer = PolicyAnswer(parsed.content, parsed.calls, episode.turns)
        episode.add_answer(tokens, log_probs, parsed.content, **parts, **thinking)
        return answer

    def _answer_limit(self, episode: Episode) -> int:
        left = self.limits.max_response - len(episode.tokens)
        return left if self.limits.max_turn_length is None else min(left, self.limits.max_turn_length)

    def _continue(self, number: int, turn: Turn | Fault) -> None:
        """Append what the environment says to the last answer, or end the episode."""
        episode, limits = self.episodes[number], self.limits
        if isinstance(turn, Fault):
            episode.fault, episode.stop_reason = turn, "error"
            return
        episode.seconds += turn.seconds
        episode.num_calls += turn.num_calls
        episode.num_errors += turn.num_errors
        episode.add_reward(turn.reward)
        if self.was_cut[number] and len(episode.tokens) == limits.max_response:
            episode.stop_reason = "length"
        elif turn.done:
            episode.stop_reason = "done"
        elif limits.max_turns is not None and episode.turns >= limits.max_turns:
            episode.stop_reason = "turns"
        elif limits.timeout is not None and episode.seconds > limits.timeout:
            episode.stop_reason = "timeout"
        if episode.stop_reason is not None:
            episode.messages += turn.messages  # for people and reward functions; the policy does not see them
            return
        messages = [self._truncated(message) for message in turn.messages]
        stopped = self.bridge.ends_answer(episode.tokens[-1])
        calls = episode.messages[-1].get("tool_calls", ())
        ids = self.bridge.after(messages, stopped, self.questions[number].tools, calls)
        if len(episode.tokens) + len(ids) >= limits.max_response:
            episode.stop_reason = "length"
        else:
            episode.add_told(ids, messages)

    def _truncated(self, message: Message) -> Message:
        limit, text = self.limits.max_text, message["content"]
        if limit is None or not isinstance(text, str) or len(text.encode()) <= limit:  # a token has at least one byte
            return message
        ids = self.bridge.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit:
            return message
        head = {"left": limit, "right": 0, "middle": limit // 2}[self.limits.truncate_side]
        kept = [ids[:head], ids[len(ids) - (limit - head) :]]
        return {**message, "content": TRUNCATED.join(map(self.bridge.decode, kept))}


def _sample(question: Question, episode: Episode) -> Sample:
    """Return the arguments of a reward function for an episode."""
    row = question.start.row
    arguments = episode_arguments(episode.messages, episode.turns, episode.stop_reason)
    answer = last_answer(episode.messages)
    return Sample(row.get("data_source"), answer, row.get("ground_truth"), row.get("extra_info"), {**row, **arguments})
