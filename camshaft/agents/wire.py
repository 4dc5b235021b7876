"""The requests and replies of OpenAI's API, as vLLM extends it with token ids.

    options = read_options(body, run, allow_sampling=False)      # raises Refused
    messages = read_messages(body["messages"])
    chat_reply(choices, body)
    event_stream(chat_reply(choices, body))                      # `stream: true`
    Refused("...").reply()

A request is refused if it has an option that would be without effect. In training, it cannot change how tokens are
sampled: options that are not those of the run are refused, unless `allow_sampling` is set. `max_tokens`, `stop` and
`stop_token_ids` are permitted, because they only end an answer earlier.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, NamedTuple

from camshaft.agents.calls import MAX_NESTING, exceeds_nesting
from camshaft.agents.environment import Message
from camshaft.config.rollout import OPTIONAL_SAMPLING
from camshaft.data.chat import join_parts
from camshaft.errors import RolloutError
from camshaft.http import Reply, json_reply
from camshaft.rollout import SamplingParams

MAX_CHOICES = 128
"""Maximum number of answers to a request."""
MAX_TOKEN = 2**31 - 1
"""Largest token id that a request may name."""

SAMPLING = ("temperature", "top_p", "top_k", *OPTIONAL_SAMPLING)
"""Options that change the distribution from which tokens are sampled."""

READ = frozenset(
    (
        *("model", "messages", "prompt", "token_ids", "max_tokens", "max_completion_tokens", "n", "stop", "tools"),
        *("stop_token_ids", "stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "tool_choice"),
        *("return_tokens_as_token_ids", "parallel_tool_calls", *SAMPLING),
    )
)
"""Options that have an effect."""

WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"),
        *("prompt_cache_retention", "prompt_cache_options", "cache_salt", "priority", "skip_special_tokens"),
        *("spaces_between_special_tokens", "routed_experts_prompt_start"),
    )
)
"""Options that do not change an answer."""

REFUSED = {
    "response_format": "answers are sampled without constraints; describe the format in a message",
    "logit_bias": "the log-probs of training would not include it",
    "seed": "the seeds of the run make its samples reproducible",
    "functions": "pass them as tools",
    "function_call": "pass functions as tools",
    "echo": "the prompt is in prompt_token_ids with return_token_ids",
    "best_of": "send n, or several requests",
    "suffix": "the model continues the prompt",
    "prompt_logprobs": "only sampled tokens have log-probs",
    "continue_final_message": "end the conversation with a user message or the result of a tool",
    "chat_template_kwargs": "set data.chat_template_kwargs in the config of the run",
    "chat_template": "set data.chat_template in the config of the run",
}
"""Options that are refused, with the reason or another way."""


class Refused(RolloutError):
    """A request is refused."""

    def __init__(self, message: str, status: int = HTTPStatus.BAD_REQUEST, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code

    def reply(self) -> Reply:
        """Return the error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return json_reply({"error": error}, self.status)


class Options(NamedTuple):
    """Options of a request."""

    sampling: SamplingParams
    """Those of the run, with the stop strings and stop tokens of the request, and with permitted changes."""
    max_tokens: int | None
    """Limit of the request."""
    n: int
    changed: dict[str, float]
    """Options that are not those of the run."""


@dataclass(frozen=True)
class Choice:
    """An answer, as it is sent to a client."""

    message: Message
    finish_reason: str
    prompt_ids: list[int]
    ids: list[int]
    log_probs: list[float]
    tokens: list[str] = field(default_factory=list)
    """Texts of `ids`."""


# -- requests -------------------------------------------------------------------------------------


def read_json(body: bytes) -> dict[str, Any]:
    """Return the object of a request."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused("the body is not a JSON object")
    return value


def read_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an option that is an object, empty if it is absent."""
    value = body.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise Refused(f"{name}={value!r} is not an object")
    return value or {}


def read_options(body: Mapping[str, Any], run: SamplingParams, allow_sampling: bool) -> Options:
    """Return the options of a request, given the sampling options of the run."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, reason in REFUSED.items():
        if name in given and not (name == "response_format" and given[name] == {"type": "text"}):
            raise Refused(f"{name} is not supported: {reason}")
    if unknown := [name for name in given if name not in READ | WITHOUT_EFFECT and name not in REFUSED]:
        raise Refused(f"{unknown[0]}={given[unknown[0]]!r} is not supported; remove it")
    if given.get("tool_choice", "auto") not in ("auto", "none"):
        raise Refused("tool_choice is not supported: answers are sampled without constraints; set it to auto or none")
    if given.get("parallel_tool_calls") is False:
        raise Refused("parallel_tool_calls=false is not supported: answers are sampled without constraints")
    if not isinstance(given.get("logprobs", 0), int):
        raise Refused(f"logprobs={given['logprobs']!r} is not supported; set it to true or false, or to 0 or 1")
    if given.get("top_logprobs", 0) or given.get("logprobs", 0) not in (0, 1):
        raise Refused("top_logprobs is not supported: only the sampled token has a log-prob; set top_logprobs=0")
    read_object(given, "stream_options")
    changed, ends = _changed(given, run, allow_sampling), _ends(given, run)
    try:
        own = run.at_temperature(changed["temperature"]) if "temperature" in changed else run
        sampling = replace(own, **{**changed, **ends})
    except RolloutError as error:  # out of the range of the option
        raise Refused(str(error).removeprefix("SamplingParams: ")) from error
    limits = [_count(given, name) for name in ("max_tokens", "max_completion_tokens") if name in given]
    number = _count(given, "n") if "n" in given else 1
    if number > MAX_CHOICES:
        raise Refused(f"n={number}; a request can have at most {MAX_CHOICES} answers")
    return Options(sampling, min(limits, default=None), number, changed)


def _changed(given: Mapping[str, Any], run: SamplingParams, allow_sampling: bool) -> dict[str, float]:
    """Return the sampling options that are not those of the run. Refuse them if they are not allowed."""
    options = {**{name: getattr(run, name) for name in SAMPLING}, "temperature": 0.0 if run.greedy else run.temperature}
    changed: dict[str, float] = {}
    for name, own in options.items():
        value = given.get(name, own)
        types = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, types) or not abs(value) <= sys.float_info.max:
            raise Refused(f"{name}={value!r} is not {'an integer' if name == 'top_k' else 'a number'}")
        if value == own or (name == "top_k" and value >= -1 and max(value, 0) == max(own, 0)):
            continue
        if not allow_sampling:
            raise Refused(
                f"{name}={value:g}, but the run samples with {name}={own:g}, and its tokens are trained on; remove "
                f"{name}, or set multi_turn.allow_sampling=true"
            )
        changed[name] = value
    return changed


def _ends(given: Mapping[str, Any], run: SamplingParams) -> dict[str, tuple[Any, ...]]:
    """Return the stop strings and stop tokens of the run and of a request."""
    stop, ids = given.get("stop", []), given.get("stop_token_ids", [])
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
        raise Refused(f"stop={stop!r}; it must be a text or a list of texts, which are not empty")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token <= MAX_TOKEN for token in ids):
        raise Refused(f"stop_token_ids={ids!r}; it must be a list of token ids")
    return {"stop": _union(run.stop, strings), "stop_token_ids": _union(run.stop_token_ids, ids)}


def _union(first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def _count(given: Mapping[str, Any], name: str) -> int:
    value = given[name]
    if type(value) is not int or value < 1:
        raise Refused(f"{name}={value!r}; it must be an integer of at least 1")
    return value


def read_messages(value: Any) -> list[Message]:
    """Validate messages, and return them in a form in which equal ones can be compared."""
    if not isinstance(value, list) or not value:
        raise Refused("messages must be a list with at least one message")
    return [read_message(message, number) for number, message in enumerate(value)]


def read_message(message: Any, number: int = 0) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refused(f"message {number} is no object with a role")
    role = {"developer": "system"}.get(message["role"], message["role"])
    if role not in ("system", "user", "assistant", "tool"):
        raise Refused(f"message {number} has the role {role!r}; it must be system, user, assistant or tool")
    calls = message.get("tool_calls")
    content = _text(message.get("content"), number)
    if content is None and not calls:
        raise Refused(f"message {number} has no content")
    kept = {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}
    if calls:
        kept["tool_calls"] = [_read_call(call, number) for call in calls]
    if exceeds_nesting(kept, MAX_NESTING + 4):  # fields, calls, a call and its function
        raise Refused(
            f"message {number} has a tool call whose arguments are nested more than {MAX_NESTING} levels deep"
        )
    return {"role": role, "content": content or "", **kept}


def _text(content: Any, number: int) -> str | None:
    text = join_parts(content)
    if text is None or isinstance(text, str):
        return text
    parts = text if isinstance(text, list) else [text]
    kinds = [part.get("type") if isinstance(part, Mapping) else part for part in parts]
    raise Refused(f"message {number} has parts of the types {kinds}; the model reads text only")


def _read_call(call: Any, number: int) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # as it was sampled
                arguments = json.loads(arguments)
        return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}
    except (KeyError, TypeError) as error:
        raise Refused(f"message {number} has a tool call without id, name or arguments") from error


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON schemas of the functions that the model may call."""
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and tool.get("type") == "function" for tool in tools
    ):
        raise Refused("tools must be a list of functions")
    return tools


# -- replies --------------------------------------------------------------------------------------


def wants_log_probs(body: Mapping[str, Any]) -> bool:
    """Return True if the reply contains log-probs. `logprobs: 0` asks for those of the sampled tokens, as 1 does."""
    return body.get("logprobs") is not None and body["logprobs"] is not False


def chat_reply(choices: Sequence[Choice], body: Mapping[str, Any], identifier: str, model: str) -> dict[str, Any]:
    """Return the reply to a request of `/v1/chat/completions`."""
    return _reply("chat.completion", choices, body, identifier, model) | {
        "choices": [
            {
                "index": index,
                "message": _wire_message(choice.message),
                "finish_reason": choice.finish_reason,
                "logprobs": {"content": _log_probs(choice, body)} if wants_log_probs(body) else None,
                **({"token_ids": choice.ids} if body.get("return_token_ids") else {}),
            }
            for index, choice in enumerate(choices)
        ]
    }


def completion_reply(choices: Sequence[Choice], body: Mapping[str, Any], identifier: str, model: str) -> dict[str, Any]:
    """Return the reply to a request of `/v1/completions`, in which prompt ids are in each choice."""
    wants_ids = body.get("return_token_ids")
    return _reply("text_completion", choices, body, identifier, model) | {
        "choices": [
            {
                "index": index,
                "text": choice.message["content"],
                "finish_reason": choice.finish_reason,
                "logprobs": _completion_log_probs(choice, body) if wants_log_probs(body) else None,
                **({"token_ids": choice.ids, "prompt_token_ids": choice.prompt_ids} if wants_ids else {}),
            }
            for index, choice in enumerate(choices)
        ]
    }


def generate_reply(choices: Sequence[Choice], body: Mapping[str, Any], identifier: str, model: str) -> dict[str, Any]:
    """Return the reply to a request of `/inference/v1/generate`, which speaks in token ids."""
    return {
        "request_id": identifier,
        "prompt_token_ids": choices[0].prompt_ids,
        "choices": [
            {
                "index": index,
                "token_ids": choice.ids,
                "finish_reason": choice.finish_reason,
                "logprobs": {"content": _log_probs(choice, {"return_tokens_as_token_ids": True})},
            }
            for index, choice in enumerate(choices)
        ],
        "model": model,
        "usage": _usage(choices),
    }


def _wire_message(message: Message) -> Message:
    """Return an answer in OpenAI's form, in which arguments are JSON texts."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _reply(
    kind: str, choices: Sequence[Choice], body: Mapping[str, Any], identifier: str, model: str
) -> dict[str, Any]:
    ids = {"prompt_token_ids": choices[0].prompt_ids} if body.get("return_token_ids") else {}
    return {
        "id": identifier,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "usage": _usage(choices),
        **ids,
    }


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompt, sampled = len(choices[0].prompt_ids), sum(len(choice.ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _names(choice: Choice, body: Mapping[str, Any]) -> list[str]:
    if body.get("return_tokens_as_token_ids"):
        return [f"token_id:{token}" for token in choice.ids]
    return choice.tokens


def _log_probs(choice: Choice, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(_names(choice, body), choice.log_probs, strict=True)
    return [
        {"token": name, "logprob": value, "bytes": list(name.encode()), "top_logprobs": []} for name, value in pairs
    ]


def _completion_log_probs(choice: Choice, body: Mapping[str, Any]) -> dict[str, Any]:
    names = _names(choice, body)
    offsets = [sum(map(len, choice.tokens[:index])) for index in range(len(names))]
    return {"tokens": names, "token_logprobs": choice.log_probs, "top_logprobs": None, "text_offset": offsets}


def event_stream(reply: dict[str, Any], body: Mapping[str, Any]) -> Iterator[bytes]:
    """Return the events of a reply for `stream: true`. Each answer is one event, and its end another one."""
    usage = reply.pop("usage")
    common = {**reply, "object": "chat.completion.chunk" if reply["object"] == "chat.completion" else reply["object"]}
    for choice in reply["choices"]:
        end = {"index": choice["index"], "finish_reason": choice["finish_reason"], "logprobs": None}
        if "message" in choice:
            message = choice.pop("message")
            calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
            delta = {**message, **({"tool_calls": calls} if calls else {})}
            parts = [{**choice, "finish_reason": None, "delta": delta}, {**end, "delta": {}}]
        else:
            parts = [{**choice, "finish_reason": None}, {**end, "text": ""}]
        for part in parts:
            yield _event({**common, "choices": [part]})
            common.pop("prompt_token_ids", None)
    if read_object(body, "stream_options").get("include_usage"):
        yield _event({**common, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, allow_nan=False).encode() + b"\n\n"
