"""The endpoint for programs: requests of several clients as rows of exactly the sampled tokens."""

import contextlib
import json
import pickle
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_templates import CHAT_FAMILIES, talking_tokenizer
from support.endpoints import LIMITS, PROMPT, SAMPLING, Client, HigherLower, Policy, user

from camshaft.agents import sessions
from camshaft.agents.bridge import Bridge
from camshaft.agents.calls import Parsed
from camshaft.agents.endpoint import Endpoint
from camshaft.agents.environment import Host, Start
from camshaft.agents.parsers import AUTO
from camshaft.agents.play import Limits, Question, play
from camshaft.agents.sessions import Session
from camshaft.agents.wire import Refused, read_options
from camshaft.errors import RolloutError
from camshaft.rollout import Answer, SamplingParams, Stream
from camshaft.rollout.stream import RowId


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy") / "model")


def answer(reply: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return reply["choices"][number]["message"]


# -- rows -----------------------------------------------------------------------------------------


def test_a_game_through_the_class_and_the_endpoint_is_equal(policy: Policy) -> None:
    questions = [Question(PROMPT, Start({"secret": n}), n) for n in range(1, 7)]
    expected = play(policy.rollout, Host({"": HigherLower}), questions, policy.bridge, LIMITS, SAMPLING)
    with policy.serve() as client:
        for question, episode in zip(questions, expected, strict=True):
            client.key = client.open(question.sampling_seed)
            game, messages, reward, done = HigherLower(), list(PROMPT), 0.0, False
            game.reset(question.start.row["secret"])
            while not done:
                messages.append(answer(client.chat(messages)))
                said, reward, done = game.step(messages[-1]["content"])
                messages.append(user(said or ""))
            (row,) = client.close()
            row.add_reward(reward)
            assert (row.prompt, row.tokens, row.mask) == (episode.prompt, episode.tokens, episode.mask)
            assert (row.rewards, row.turns) == (episode.rewards, episode.turns)
            assert (row.stop_reason or "done") == episode.stop_reason
            assert row.log_probs == pytest.approx(episode.log_probs, abs=1e-6)
            assert row.messages == episode.messages[: len(row.messages)]
            assert row.num_recomputed == episode.num_recomputed
            policy.check_log_probs(row)


def test_only_what_follows_an_answer_is_formatted(policy: Policy) -> None:
    with policy.serve() as client:
        messages: list[Any] = list(PROMPT)
        for turn in range(4):
            messages += [answer(client.chat(messages, max_tokens=5 + turn)), user(f"{turn}")]
        (row,) = client.close()
    assert row.turns == 4
    assert row.messages == messages[:-1]
    policy.check_log_probs(row)
    told = policy.tokenizer.decode([token for token, mask in zip(row.tokens, row.mask, strict=True) if not mask])
    assert isinstance(told, str)
    for turn in range(3):
        assert f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n" in told


def test_eight_equal_requests_are_eight_samples(policy: Policy) -> None:
    def texts(replies: list[dict[str, Any]]) -> list[str]:
        return [choice["message"]["content"] for reply in replies for choice in reply["choices"]]

    with policy.serve() as client:
        one_by_one = texts([client.chat(PROMPT) for _ in range(8)])
        rows = client.close()
        client.key = client.open()
        together = texts([client.chat(PROMPT, n=8)])
        client.close()
        client.key = client.open()
        replies: list[dict[str, Any]] = []
        threads = [threading.Thread(target=lambda: replies.append(client.chat(PROMPT))) for _ in range(8)]
        run_all(threads)
        client.close()
        assert client.endpoint.num_other_histories == 0
    assert len(set(one_by_one)) == 8
    assert [policy.bridge.decode(row.tokens) for row in rows] == one_by_one == together
    assert sorted(texts(replies)) == sorted(one_by_one)
    alone = play(policy.rollout, Host({"": Once}), [Question(PROMPT, Start({}), 1)], policy.bridge, LIMITS, SAMPLING)
    assert rows[0].tokens == alone[0].tokens  # the first row has the seed of the question


def test_a_client_that_has_read_its_answer_gets_another(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that has written an answer may notice it after the client has asked again."""
    write = sessions.Exchange.writing

    @contextlib.contextmanager
    def slowly(exchange: sessions.Exchange) -> Iterator[None]:
        with write(exchange):
            yield
            time.sleep(0.2)

    monkeypatch.setattr(sessions.Exchange, "writing", slowly)
    with policy.serve() as client:
        replies = [client.chat(PROMPT)["choices"][0]["message"]["content"] for _ in range(3)]
    assert len(set(replies)) == 3


class Once:
    def reset(self) -> None: ...
    def step(self, answer: str) -> tuple[None, float, bool]:
        return None, 0.0, True


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_answers_of_one_request_are_continued_in_their_rows(policy: Policy) -> None:
    with policy.serve() as client:
        reply = client.chat(PROMPT, n=3)
        for number in (2, 0):
            client.chat([*PROMPT, answer(reply, number), user("again")])
        rows = client.close()
    assert [row.turns for row in rows] == [2, 1, 2]


def test_another_request_behind_the_same_history_is_a_row_of_its_own(policy: Policy) -> None:
    with policy.serve() as client:
        first = answer(client.chat(PROMPT))
        second = [answer(client.chat([*PROMPT, first, user(text)])) for text in ("lower", "lower", "higher")]
        client.chat([*PROMPT, first, user("higher"), second[2], user("right")])
        rows = client.close()
        assert client.endpoint.num_other_histories == 0
    assert [row.turns for row in rows] == [2, 1, 2]
    ends = [len(first_answer) for first_answer in [rows[0].tokens[: rows[0].mask.index(False)]]]
    for row in rows[1:]:
        assert row.prompt == rows[0].prompt
        assert row.tokens[: ends[0]] == rows[0].tokens[: ends[0]]  # as it was sampled
        assert not any(row.mask[: ends[0]])  # and trained on in the first row only
    for row in rows:
        policy.check_log_probs(row)
    assert rows[1].messages[:3] == rows[0].messages[:3]


def test_a_rewritten_history_is_a_new_row(policy: Policy) -> None:
    with policy.serve() as client:
        first = answer(client.chat(PROMPT))
        client.chat([*PROMPT, {**first, "content": "a summary"}, user("lower")])
        rows = client.close()
        assert client.endpoint.num_other_histories == 1
    assert [row.turns for row in rows] == [1, 1]
    assert "a summary" in policy.bridge.decode(rows[1].prompt)
    assert rows[1].tokens[0] != rows[0].tokens[0] or rows[1].tokens != rows[0].tokens


def test_messages_are_equal_in_any_spelling(policy: Policy) -> None:
    with policy.serve() as client:
        first = answer(client.chat(PROMPT))
        spelled = {"content": [{"type": "text", "text": first["content"]}], "role": "assistant", "refusal": None}
        client.chat([{"content": PROMPT[0]["content"], "role": "user", "name": None}, spelled, user("lower")])
        assert [row.turns for row in client.close()] == [2]


# -- repetitions ----------------------------------------------------------------------------------


def drop(client: Client, body: bytes, key: str, **headers: str) -> None:
    """Send a request, and close the connection before the answer."""
    connection = client.connect()
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}", **headers})
    connection.close()


@pytest.mark.parametrize("header", [{}, {"x-stainless-retry-count": "1"}], ids=["silent", "counted"])
def test_a_lost_answer_is_repeated(policy: Policy, header: dict[str, str]) -> None:
    body = json.dumps({"model": "m", "messages": PROMPT}).encode()
    with policy.serve() as client:
        drop(client, body, client.key)
        status, reply = client.ask(body, **header)
        assert status == 200
        (row,) = client.close()
        assert answer(reply)["content"] == policy.bridge.decode(row.tokens)


def test_a_counted_retry_gets_the_answer_again(policy: Policy) -> None:
    body = json.dumps({"model": "m", "messages": PROMPT}).encode()
    with policy.serve() as client:
        replies = [client.ask(body)[1], client.ask(body, **{"x-stainless-retry-count": "1"})[1], client.ask(body)[1]]
        rows = client.close()
    assert [reply["id"] for reply in replies] == ["0.0.52", "0.0.52", "0.1.52"]
    assert len(rows) == 2


def test_sixty_four_clients_with_dropped_connections(policy: Policy) -> None:
    def run(number: int) -> None:
        body = json.dumps({"model": "m", "messages": PROMPT, "n": 2}).encode()
        drop(client, body, keys[number])
        own = Client.__new__(Client)
        own.endpoint, own.key = client.endpoint, keys[number]
        status, reply = own.ask(body, **{"x-stainless-retry-count": "1"})
        assert status == 200
        replies[number] = [choice["message"]["content"] for choice in reply["choices"]]

    with policy.serve() as client:
        keys = [client.open(seed) for seed in range(64)]
        replies: dict[int, list[str]] = {}
        run_all([threading.Thread(target=run, args=(number,)) for number in range(64)])
        rows = [client.endpoint.close(key) for key in keys]
    assert [len(session) for session in rows] == [2] * 64
    for number, session in enumerate(rows):
        assert replies[number] == [policy.bridge.decode(row.tokens) for row in session]


# -- limits and refusals --------------------------------------------------------------------------


def test_limits_end_a_row(policy: Policy) -> None:
    limits = Limits(max_prompt=60, max_response=30, max_turns=2, max_turn_length=4)
    with policy.serve(limits) as client:
        first = answer(client.chat(PROMPT))
        assert len(first["content"]) <= 4
        assert "data.max_response_length=30" in client.refusal([*PROMPT, first, user("x" * 40)])
        assert [row.stop_reason for row in client.close()] == ["length"]

        client.key = client.open()
        messages = [*PROMPT, answer(client.chat(PROMPT)), user("")]
        messages += [answer(client.chat(messages)), user("")]
        assert "multi_turn.max_assistant_turns=2" in client.refusal(messages)
        (row,) = client.close()
        assert (row.stop_reason, row.turns) == ("turns", 2)

        client.key = client.open()
        status, reply = client.ask({"messages": [user("x" * 100)]})
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert [row.stop_reason for row in client.close()] == ["prompt"]


def test_an_answer_that_fills_the_row_ends_it(policy: Policy) -> None:
    with policy.serve(Limits(max_prompt=100, max_response=3)) as client:
        reply = client.chat(PROMPT)
        assert reply["choices"][0]["finish_reason"] == "length"
        (row,) = client.close()
        assert (len(row.tokens), row.stop_reason) == (3, "length")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": 0.5}, "temperature=0.5, but the run samples with temperature=1"),
        ({"top_p": 0.9}, "top_p=0.9, but the run samples with top_p=1"),
        ({"temperature": "hot"}, "temperature='hot' is not a number"),
        ({"temperature": 10**400}, "is not a number"),
        ({"top_k": 2.5}, "top_k=2.5 is not an integer"),
        ({"stop": 3}, "stop=3; it must be a text or a list of texts"),
        ({"stop": [""]}, "stop=['']; it must be a text or a list of texts"),
        ({"stop_token_ids": 3}, "stop_token_ids=3; it must be a list of token ids"),
        ({"stop_token_ids": [2**64]}, "it must be a list of token ids"),
        ({"logprobs": "all"}, "logprobs='all' is not supported"),
        ({"stream_options": 1}, "stream_options=1 is not an object"),
        ({"sampling_params": [1]}, "sampling_params=[1] is not an object"),
        ({"seed": {"type": "text"}}, "seed is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"logit_bias": {"3": 1}}, "logit_bias is not supported"),
        ({"seed": 3}, "seed is not supported: the seeds of the run"),
        ({"tool_choice": "required"}, "tool_choice is not supported"),
        ({"top_logprobs": 2, "logprobs": True}, "set top_logprobs=0"),
        ({"guided_regex": "a"}, "guided_regex='a' is not supported; remove it"),
        ({"max_tokens": 0}, "max_tokens=0; it must be an integer of at least 1"),
        ({"n": 1000}, "at most 128 answers"),
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "message 0 has the role 'judge'"),
        ({"messages": [user("x"), {"role": "user"}]}, "message 1 has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "message 0 has parts of the types ['image_url']; the model reads text only",
        ),
    ],
)
def test_requests_are_refused_in_a_sentence(policy: Policy, options: dict[str, Any], sentence: str) -> None:
    with policy.serve() as client:
        assert sentence in client.refusal(**{"messages": PROMPT, **options})
        assert client.close() == []


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 2}, {"presence_penalty": 3}, {"min_p": float("nan")}, {"top_k": -5}]
)
def test_an_option_out_of_range_is_refused(policy: Policy, options: dict[str, float]) -> None:
    (name,) = options
    for allow_sampling in (True, False):
        with policy.serve(allow_sampling=allow_sampling) as client:
            assert name in client.refusal(PROMPT, **options)
            client.chat(PROMPT)


def test_an_option_without_support_fails_its_request(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = policy.rollout
    monkeypatch.setattr(type(rollout), "capabilities", replace(rollout.capabilities, sampling=frozenset()))
    with policy.serve(allow_sampling=True) as client:
        assert "TorchRollout does not support min_p=0.1" in client.refusal(PROMPT, min_p=0.1)
        client.chat(PROMPT)
        (row,) = client.close()
    assert row.turns == 1


def test_options_of_the_run_and_without_effect_are_accepted(policy: Policy) -> None:
    with policy.serve() as client:
        client.chat(PROMPT, temperature=1, top_p=1.0, top_k=-1, user="me", response_format={"type": "text"}, n=None)
        (row,) = client.close()
        assert row.sampling == []


def test_allowed_sampling_options_are_recorded(policy: Policy) -> None:
    with policy.serve(allow_sampling=True) as client:
        messages = [*PROMPT, answer(client.chat(PROMPT)), user("lower")]
        client.chat(messages, temperature=0)
        (row,) = client.close()
    assert row.sampling == [{}, {"temperature": 0}]
    start = len(row.mask) - row.mask[::-1].index(False)
    logits = policy.oracle(torch.tensor([row.prompt + row.tokens])).logits[0, len(row.prompt) + start - 1 : -1]
    assert row.tokens[start:] == logits.argmax(-1).tolist()  # greedy


def test_a_stop_string_ends_an_answer_and_stays_in_the_row(policy: Policy) -> None:
    with policy.serve() as client:
        whole = answer(client.chat(PROMPT))["content"]
        client.close()
        client.key = client.open()
        reply = client.chat(PROMPT, stop=whole[2])
        (row,) = client.close()
    end = whole.index(whole[2])
    assert (answer(reply)["content"], reply["choices"][0]["finish_reason"]) == (whole[:end], "stop")
    assert policy.bridge.decode(row.tokens) == whole[: end + 1]


# -- the wire -------------------------------------------------------------------------------------


def test_token_ids_are_those_of_the_row(policy: Policy) -> None:
    with policy.serve() as client:
        reply = client.chat(PROMPT, return_token_ids=True, logprobs=True, top_logprobs=0)
        (choice,), usage = reply["choices"], reply["usage"]
        (row,) = client.close()
    assert (reply["prompt_token_ids"], choice["token_ids"]) == (row.prompt, row.tokens)
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == row.log_probs
    assert [entry["token"] for entry in content] == [policy.tokenizer.decode([token]) for token in row.tokens]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(row.prompt), len(row.tokens))
    assert choice["finish_reason"] == ("stop" if row.tokens[-1] == policy.tokenizer.eos_token_id else "length")


def test_texts_are_continued(policy: Policy) -> None:
    with policy.serve() as client:
        _, first = client.ask({"prompt": "Guess: ", "logprobs": 1, "return_token_ids": True}, "/v1/completions")
        text = "Guess: " + first["choices"][0]["text"]
        status, second = client.ask({"prompt": text + " lower "}, "/v1/completions")
        (row,) = client.close()
    assert status == 200
    policy.check_log_probs(row)
    assert row.prompt == first["choices"][0]["prompt_token_ids"] == policy.tokenizer("Guess: ")["input_ids"]
    log_probs = first["choices"][0]["logprobs"]["token_logprobs"]
    assert log_probs == row.log_probs[: len(log_probs)]
    assert policy.bridge.decode(row.tokens) == text.removeprefix("Guess: ") + " lower " + second["choices"][0]["text"]


@pytest.mark.parametrize("option", [0, 1, True])
def test_log_probs_of_texts_have_tokens(policy: Policy, option: int) -> None:
    with policy.serve() as client:
        _, reply = client.ask({"prompt": "Guess: ", "logprobs": option}, "/v1/completions")
        (row,) = client.close()
    log_probs = reply["choices"][0]["logprobs"]
    assert log_probs["token_logprobs"] == row.log_probs
    assert log_probs["tokens"] == [policy.tokenizer.decode([token]) for token in row.tokens]


def test_a_stream_of_token_ids_is_refused(policy: Policy) -> None:
    with policy.serve() as client:
        status, reply = client.ask({"token_ids": [5, 6], "stream": True}, "/inference/v1/generate")
        assert (status, client.close()) == (400, [])
    assert "stream is not supported for token ids" in reply["error"]["message"]


def test_token_ids_are_continued(policy: Policy) -> None:
    ids = policy.bridge.start(PROMPT)
    sampling = {"stop_token_ids": [policy.tokenizer.eos_token_id], "logprobs": 1, "skip_special_tokens": False}
    with policy.serve() as client:
        for told in ([5, 6, 7], [8]):
            body = {"token_ids": ids, "sampling_params": {**sampling, "temperature": 1.0}}
            status, reply = client.ask(body, "/inference/v1/generate")
            assert status == 200, reply
            (choice,) = reply["choices"]
            assert reply["prompt_token_ids"] == ids
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
                f"token_id:{token}" for token in choice["token_ids"]
            ]
            ids = [*ids, *choice["token_ids"], *told]
        (row,) = client.close()
        body = {"token_ids": ids, "sampling_params": {"temperature": 0.5}}
        client.key = client.open()
        assert client.ask(body, "/inference/v1/generate")[0] == 400
        assert client.ask({"token_ids": [10**6]}, "/inference/v1/generate")[0] == 400
    assert row.prompt + row.tokens == ids[:-1]
    policy.check_log_probs(row)


def test_events_are_the_answer(policy: Policy) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "logprobs": True}
    with policy.serve() as client:
        status, content = client.ask({"messages": PROMPT, **options})
        (row,) = client.close()
    assert status == 200
    *events, end = [event.removeprefix("data: ") for event in content.decode().split("\n\n") if event]
    assert end == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": policy.bridge.decode(row.tokens)}
    assert (chunks[0]["prompt_token_ids"], chunks[0]["choices"][0]["token_ids"]) == (row.prompt, row.tokens)
    assert chunks[1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert chunks[2]["usage"]["completion_tokens"] == len(row.tokens)


def test_models_are_listed(policy: Policy) -> None:
    with policy.serve() as client:
        connection = client.connect()
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {client.key}"})
        (model,) = json.loads(connection.getresponse().read())["data"]
        connection.close()
        assert client.endpoint.idle(client.key).requests == 0  # it asks for no answer
    assert (model["id"], model["max_model_len"]) == ("policy", 300)


# -- sessions -------------------------------------------------------------------------------------


def test_a_key_is_that_of_an_open_session(policy: Policy) -> None:
    with policy.serve() as client:
        own, client.key = client.key, "sk-wrong"
        status, reply = client.ask({"messages": PROMPT})
        assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
        client.key = own
        assert client.ask({"messages": PROMPT}, "/v1/embeddings")[0] == 404
        assert client.ask(b"{", "/v1/chat/completions")[0] == 400
        client.close()
        assert client.ask({"messages": PROMPT})[0] == 401


def test_an_answer_that_has_not_ended_is_not_in_the_row(policy: Policy) -> None:
    body = json.dumps({"model": "m", "messages": PROMPT, "n": 4}).encode()
    with policy.serve() as client:
        drop(client, body, client.key)
        rows = client.close()
        assert all(row.turns == 1 for row in rows)  # none, or those that have ended
        client.key = client.open(seed=2)
        client.chat(PROMPT)
        assert [row.turns for row in client.close()] == [1]


def test_a_failed_rollout_ends_the_sessions(policy: Policy) -> None:
    with policy.serve() as client:
        policy.rollout.sleep()
        try:
            status, reply = client.ask({"messages": PROMPT})
            assert (status, reply["error"]["type"]) == (500, "server_error")
            with pytest.raises(RolloutError, match=r"the rollout has failed: .*asleep"):
                client.close()
        finally:
            policy.rollout.wake_up()
            policy.rollout.load_weights(policy.oracle.named_parameters())


@pytest.mark.timeout(30)
def test_requests_behind_an_error_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(session: Session, answer: Answer) -> None:
        raise ValueError("lost")

    with scripted("a", "b", "c") as (client, _):
        own = client.key
        with monkeypatch.context() as patch:
            patch.setattr(Session, "receive", fail)
            assert client.ask({"messages": PROMPT})[0] == 500
        for key in (own, client.open()):
            client.key = key
            status, reply = client.ask({"messages": PROMPT})
            assert (status, reply["error"]["message"]) == (500, "the rollout failed: lost")


def test_time_without_requests_is_measured(policy: Policy) -> None:
    with policy.serve() as client:
        time.sleep(0.2)
        before = client.endpoint.idle(client.key)
        assert before.requests == 0
        assert 0.2 <= before.last == before.total < 10
        client.chat(PROMPT)
        after = client.endpoint.idle(client.key)
        assert after.requests == 1
        assert after.last < after.total - 0.1


# -- tools ----------------------------------------------------------------------------------------

TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class Scripted(Stream):
    """A stream whose answers are given texts, with the token that ends them."""

    def __init__(self, tokenizer: Any, texts: list[str]):
        self.tokenizer, self.texts = tokenizer, texts
        self.answers: queue.Queue[Answer] = queue.Queue()
        self.contexts: list[list[int]] = []

    def put(
        self, row_id: RowId, tokens: Sequence[int], sampling: SamplingParams, seed: int, generated: Sequence[int] = ()
    ) -> None:
        self.contexts.append(list(tokens))
        ids = [*self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False), self.tokenizer.eos_token_id]
        self.answers.put(Answer(row_id, ids, [-1.0] * len(ids), [0] * len(ids), "stop"))

    def take(self, timeout: float) -> list[Answer]:
        try:
            return [self.answers.get(timeout=timeout)]
        except queue.Empty:
            return []

    def interrupt(self) -> list[Answer]:
        return []

    def close(self, row_id: RowId) -> None: ...
    def stop(self) -> None: ...


@contextlib.contextmanager
def scripted(*texts: str, call_format: str = AUTO) -> Iterator[tuple[Client, Scripted]]:
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    tokenizer.chat_template = TOOLS_TEMPLATE
    stream, bridge = Scripted(tokenizer, list(texts)), Bridge(tokenizer, call_format=call_format)
    with Endpoint(stream, bridge, Limits(2000, 4000), SAMPLING, "policy") as endpoint:
        yield Client(endpoint), stream


CALL_TEXT = 'I add.<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'


def test_calls_of_tools_are_read_and_continued() -> None:
    with scripted(CALL_TEXT, "The sum is 7.") as (client, stream):
        reply = client.chat(PROMPT, tools=[ADD])
        message = answer(reply)
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        (call,) = message["tool_calls"]
        assert (message["content"], call["type"]) == ("I add.", "function")
        assert call["function"] == {"name": "add", "arguments": '{"a": 3}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
        assert answer(client.chat([*PROMPT, message, result], tools=[ADD]))["content"] == "The sum is 7."
        (row,) = client.close()
    assert row.turns == 2
    prompt = stream.tokenizer.apply_chat_template(PROMPT, tools=[ADD], add_generation_prompt=True, tokenize=False)
    told = "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    assert stream.tokenizer.decode(row.prompt) == prompt
    assert stream.tokenizer.decode(stream.contexts[1]) == f"{prompt}{CALL_TEXT}<|im_end|>{told}"
    assert [m["role"] for m in row.messages] == ["user", "assistant", "tool", "assistant"]


def test_the_format_of_calls_is_that_of_the_run() -> None:
    text = '{"name": "add", "parameters": {"a": 3}}'
    for call_format, expected in (("hermes", None), ("json", '{"a": 3}')):
        with scripted(text, call_format=call_format) as (client, _):
            calls = answer(client.chat(PROMPT, tools=[ADD])).get("tool_calls", [])
            assert [call["function"]["arguments"] for call in calls] == ([] if expected is None else [expected])


def test_an_answer_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    file = tmp_path / "format.py"
    file.write_text(
        f"def read(text):\n    from {Parsed.__module__} import Parsed\n    return Parsed(text[text.index('.'):])"
    )
    with scripted("none", "a.b", call_format=f"{file}:read") as (client, _):
        status, reply = client.ask({"messages": PROMPT, "tools": [ADD]})
        assert (status, reply["error"]["type"]) == (500, "server_error")
        assert "the answer cannot be read: ValueError: substring not found" in reply["error"]["message"]
        assert answer(client.chat(PROMPT, tools=[ADD]))["content"] == "a.b"
        (row,) = client.close()
    assert [message["content"] for message in row.messages] == [PROMPT[0]["content"], "a.b"]


def test_an_answer_after_the_end_of_its_session_is_dropped() -> None:
    with scripted("a", "b") as (client, stream):
        client.chat(PROMPT)
        session = next(iter(client.endpoint._sessions.values()))
        session.close()  # before the endpoint has passed on the answer
        stream.answers.put(Answer("0.0", [1], [-1.0], [0], "stop"))
        client.key = client.open()
        assert answer(client.chat(PROMPT))["content"] == "b"


def test_calls_with_deeply_nested_arguments_are_texts() -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {"[" * 1500}{"]" * 1500}}}</tool_call>'
    with scripted(text, "b") as (client, _):
        assert answer(client.chat(PROMPT, tools=[ADD]))["content"] == text
        call = {"id": "0", "type": "function", "function": {"name": "add", "arguments": "[" * 10**5}}
        status, _ = client.ask({"messages": [*PROMPT, {"role": "assistant", "tool_calls": [call]}], "tools": [ADD]})
        assert status == 400  # too long for a prompt


def test_deeply_nested_calls_of_clients_are_refused() -> None:
    for depth, status in ((100, 200), (101, 400), (600, 400)):
        arguments = '{"a": ' * depth + "1" + "}" * depth
        for sent in (arguments, json.loads(arguments)):
            call = {"id": "0", "type": "function", "function": {"name": "add", "arguments": sent}}
            messages = [*PROMPT, {"role": "assistant", "tool_calls": [call]}, user("x")]
            with scripted("b") as (client, _):
                got, reply = client.ask({"messages": messages, "tools": [ADD]})
                assert got == status, reply
                if status == 400:
                    assert "arguments are nested more than 100 levels deep" in reply["error"]["message"]
                pickle.dumps(client.close())


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("<tool_call>{broken</tool_call>", {"tools": [ADD]}),
        (CALL_TEXT, {"tools": [ADD], "tool_choice": "none"}),
        (CALL_TEXT, {}),
    ],
    ids=["malformed", "none", "without tools"],
)
def test_other_answers_are_texts(text: str, options: dict[str, Any]) -> None:
    with scripted(text) as (client, _):
        reply = client.chat(PROMPT, **options)
        assert answer(reply) == {"role": "assistant", "content": text}
        assert reply["choices"][0]["finish_reason"] == "stop"


def test_other_tools_are_another_conversation() -> None:
    with scripted("a", "b") as (client, _):
        first = answer(client.chat(PROMPT, tools=[ADD]))
        client.chat([*PROMPT, first, user("x")])
        assert [row.turns for row in client.close()] == [1, 1]


def test_calls_are_sent_as_events() -> None:
    with scripted(CALL_TEXT) as (client, _):
        _, content = client.ask({"messages": PROMPT, "tools": [ADD], "stream": True})
    first, second, _ = [event.removeprefix("data: ") for event in content.decode().split("\n\n") if event]
    (call,) = json.loads(first)["choices"][0]["delta"]["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "add")
    assert json.loads(second)["choices"][0]["finish_reason"] == "tool_calls"


def test_a_permitted_temperature_samples_in_a_greedy_run() -> None:
    greedy = replace(SAMPLING, do_sample=False, stop=("x",))
    options = read_options({"temperature": 0.5, "stop": ["y", "x"], "n": 2}, greedy, allow_sampling=True)
    assert options.sampling == replace(greedy, temperature=0.5, do_sample=True, stop=("x", "y"))
    assert (options.n, options.max_tokens, options.changed) == (2, None, {"temperature": 0.5})
    assert read_options({"temperature": 0}, greedy, allow_sampling=False).sampling == greedy
    with pytest.raises(Refused, match="temperature=1, but the run samples with temperature=0"):
        read_options({"temperature": 1.0}, greedy, allow_sampling=False)
