"""Play episodes over any rollout: the policy and the environments take turns until each episode has ended.

    limits = Limits(max_prompt=512, max_response=2048, max_turns=8)
    episodes = play(rollout, Host({"": HigherLower}), questions, Bridge(tokenizer), limits, SamplingParams(2048))

Answers are generated in waves, one call of the rollout for all episodes that still run. The tokens of an episode depend
only on its seed and its history, so neither waves nor other episodes have an effect on them. Where the numbers of a
rollout are a function of seed and position (`RolloutCapabilities.continues_rows`), all answers use the seed of the row.
Other rollouts get a seed of its own for each answer. Penalties and stop strings apply to the current answer. A rollout
that keeps rows (`RolloutCapabilities.keeps_rows`) computes each token of an episode once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from camshaft.agents.bridge import Bridge
from camshaft.agents.calls import PolicyAnswer
from camshaft.agents.environment import Environments, Fault, Message, Start, Turn
from camshaft.agents.episode import Episode
from camshaft.errors import RolloutError
from camshaft.rewards.environments import episode_arguments, last_answer
from camshaft.rewards.messages import Sample
from camshaft.rollout import BaseRollout, SamplingParams, WaveRow, generate_wave

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
) -> list[Episode]:
    """Play one episode for each question, and return them in the same order.

    `max_tokens` of `sampling` is replaced by what `limits` leaves for an answer.
    """
    game = _Game(rollout, environments, bridge, limits, sampling)
    return game.play(questions)


class _Game:
    """Episodes in progress, with the arguments of `play`."""

    def __init__(
        self,
        rollout: BaseRollout,
        environments: Environments,
        bridge: Bridge,
        limits: Limits,
        sampling: SamplingParams,
    ):
        self.rollout, self.environments, self.bridge = rollout, environments, bridge
        self.limits, self.sampling = limits, sampling
        self.episodes: list[Episode] = []
        self.questions: Sequence[Question] = ()

    def play(self, questions: Sequence[Question]) -> list[Episode]:
        self.questions = questions
        turns = self.environments.reset({number: question.start for number, question in enumerate(questions)})
        self.episodes = [self._begin(question, turns[number]) for number, question in enumerate(questions)]
        running = [number for number, episode in enumerate(self.episodes) if episode.stop_reason is None]
        while running:
            answered = self._generate(running)
            turns = self.environments.step({number: answer for number, (answer, _) in answered.items()})
            for number, (_, was_cut) in answered.items():
                self._continue(self.episodes[number], self.questions[number], turns[number], was_cut)
            self.rollout.close_rows(number for number in running if self.episodes[number].stop_reason is not None)
            running = [number for number in running if self.episodes[number].stop_reason is None]
        self._add_scores()
        self._judge()
        self.environments.end(range(len(questions)))
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

    def _begin(self, question: Question, turn: Turn | Fault) -> Episode:
        episode = Episode(list(question.messages))
        if isinstance(turn, Fault):
            episode.fault, episode.stop_reason = turn, "error"
            return episode
        episode.seconds += turn.seconds
        episode.messages = turn.prompt(episode.messages)
        episode.prompt = self.bridge.start(episode.messages, question.tools)
        if len(episode.prompt) > self.limits.max_prompt:
            episode.stop_reason = "prompt"
        return episode

    def _generate(self, running: Sequence[int]) -> dict[int, tuple[str | PolicyAnswer, bool]]:
        """Append an answer to each episode. Return the answers, and whether they reached a limit."""
        wave = [self._row(number) for number in running]
        answers: dict[int, tuple[str | PolicyAnswer, bool]] = {}
        for number, sampled in zip(running, generate_wave(self.rollout, wave), strict=True):
            episode = self.episodes[number]
            episode.num_recomputed += episode.num_computed - sampled.num_cached
            if not sampled.tokens:
                raise RolloutError("the rollout returned an empty answer; increase rollout.max_model_len")
            answer = self._add_answer(episode, sampled.tokens, sampled.log_probs, self.questions[number].tools)
            episode.num_computed = len(episode.prompt) + len(episode.tokens) - 1  # all but the last sampled token
            answers[number] = answer, sampled.reason == "length"
        return answers

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

    def _continue(self, episode: Episode, question: Question, turn: Turn | Fault, was_cut: bool) -> None:
        """Append what the environment says to the last answer, or end the episode."""
        limits = self.limits
        if isinstance(turn, Fault):
            episode.fault, episode.stop_reason = turn, "error"
            return
        episode.seconds += turn.seconds
        episode.num_calls += turn.num_calls
        episode.num_errors += turn.num_errors
        episode.add_reward(turn.reward)
        if was_cut and len(episode.tokens) == limits.max_response:
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
        ids = self.bridge.after(messages, stopped, question.tools, calls)
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
