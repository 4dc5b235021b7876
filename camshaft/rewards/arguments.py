"""Arguments of reward functions, passed by name: the response, the ground truth and columns of the data file.

    arguments = Arguments.of(function, batched=None, kwargs={})     # from the parameters of the function
    arguments.columns                                               # columns of the data file that it reads
    function(**arguments.single(sample), **kwargs)                  # or arguments.batch(samples)

A function receives only the arguments that it has parameters for. A parameter `**kwargs` receives all columns if
the function has a parameter for the response and none for `extra_info`. Otherwise it receives the arguments of verl:
data source, response, ground truth and extra info.

In a run with environments, a function with a parameter `environments` is called in the process of the environment, once
for each episode, with a list that contains the environment. Its other arguments are lists of one, as in TRL, unless it
has a parameter for a single response.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from camshaft.rewards.messages import Sample

SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
EXTRA = ("extra_info", "extra_infos")
RESPONSE, RESPONSES = ("solution_str", "response", "completion"), ("solution_strs", "responses", "completions")
"""Names of the response, for one sample and for a batch."""
ENVIRONMENTS = "environments"
"""Parameter for the environments of the episodes."""
_COLUMNS = ("data_source", "ground_truth", "extra_info")
"""Columns that a batched function can also name as in the data file."""


class Arguments(NamedTuple):
    batched: bool
    parameters: tuple[str, ...]
    takes_all: bool
    """True if the function receives all columns of the data file."""
    required: tuple[str, ...]
    """Parameters without a default that are columns of the data file."""
    takes_environments: bool = False
    """True if the function is called in the processes of environments."""

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        batched: bool | None,
        kwargs: Mapping[str, Any],
        has_environments: bool = False,
    ) -> Self:
        """Read the parameters of a function. Raise TypeError if it cannot be called with these arguments by name.

        `batched` None means detect it from the parameters. `kwargs` are further arguments of every call.
        `has_environments` is True in a run with environments.
        """
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:  # functions written in C may have no signature
            return cls(bool(batched), BATCH if batched else SINGLE, False, ())
        takes_environments = has_environments and ENVIRONMENTS in parameters
        if takes_environments and batched:
            raise TypeError(
                f"it has a parameter '{ENVIRONMENTS}', so it is called once for each episode, in the process of the "
                "environment, and cannot compare the episodes of a batch. Remove custom_reward_function.batched=true, "
                f"or the parameter '{ENVIRONMENTS}'"
            )
        if batched is None:
            is_single = any(name in parameters for name in RESPONSE)
            batched = any(name in parameters for name in RESPONSES) or (takes_environments and not is_single)
        kinds = [parameter.kind for parameter in parameters.values()]
        names = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        has_keywords = inspect.Parameter.VAR_KEYWORD in kinds
        if inspect.Parameter.POSITIONAL_ONLY in kinds:
            raise TypeError("arguments are passed by name; remove '/' from its parameters")
        response_names = RESPONSES if batched else RESPONSE
        if not has_keywords and not takes_environments and not set(response_names) & set(names):
            raise TypeError(
                f"it has no parameter for the response; name it {', '.join(response_names[:-1])} or "
                f"{response_names[-1]}"
            )
        unknown_kwargs = [name for name in kwargs if name not in parameters]
        if unknown_kwargs and not has_keywords:
            raise TypeError(f"it has no parameter {unknown_kwargs[0]!r} of reward_kwargs")
        standard = {*((*BATCH, *_COLUMNS) if batched else SINGLE), *response_names, *kwargs}
        standard |= {"prompts" if batched else "prompt", *([ENVIRONMENTS] if takes_environments else [])}
        required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
        is_ours = takes_environments or bool(set(response_names) & set(names))
        takes_all = has_keywords and is_ours and not set(EXTRA) & set(names)
        if has_keywords and not takes_all:
            names += [name for name in (BATCH if batched else SINGLE) if name not in names]
        required = tuple(name for name in required if name not in standard)
        return cls(batched, tuple(names), takes_all, required, takes_environments)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns of the data file that the function reads; None for all columns."""
        if self.takes_all:
            return None
        standard = {*SINGLE, *BATCH, *RESPONSE, *RESPONSES, *([ENVIRONMENTS] if self.takes_environments else [])}
        names = [name for name in self.parameters if name not in standard]
        needs_prompt = "prompts" in names or "completions" in self.parameters
        return tuple(dict.fromkeys([*(name for name in names if name != "prompts"), *["prompt"] * needs_prompt]))

    def single(self, sample: Sample) -> dict[str, Any]:
        values = sample.row | dict(zip(SINGLE, sample[:4], strict=True)) | dict.fromkeys(RESPONSE, sample.solution_str)
        return self._select(values)

    def batch(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the arguments for a batch, lists with one entry per sample.

        Completions have the form of the prompts, text or messages, as in TRL.
        """
        names = dict.fromkeys(name for sample in samples for name in sample.row)
        columns = [name for name in _COLUMNS if name in self.parameters]
        values: dict[str, Any] = {name: [sample._asdict()[name] for sample in samples] for name in columns}
        values |= {name: [sample.row.get(name) for sample in samples] for name in names}
        prompts = values.get("prompt", [None] * len(samples))
        texts = [sample.solution_str for sample in samples]
        completions = [
            text if not isinstance(prompt, list) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        values |= dict(zip(BATCH, map(list, zip(*[sample[:4] for sample in samples], strict=True)), strict=True))
        return self._select(values | {"responses": texts, "completions": completions, "prompts": prompts})

    def _select(self, values: dict[str, Any]) -> dict[str, Any]:
        return values if self.takes_all else {name: values[name] for name in self.parameters if name in values}
