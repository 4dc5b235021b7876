"""Section `data` of RL runs: prompt files, length limits and batch sizes."""

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt

from camshaft.config.errors import Problem
from camshaft.config.schema.fields import Auto, Count, OffOrPositive, Path, Paths, Section, Text, Unread, key

Truncation = Literal["error", "left", "right", "middle"]


NOT_SHUFFLED = Unread(lambda data: not data.shuffle, "{shuffle}")
DROPS_OVERLONG = Unread(
    lambda data: data.filter_overlong_prompts,
    "{filter_overlong_prompts}, which drops overlong prompts",
    harmless=("error",),
)

_RESERVED = (
    *("messages", "conversation", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"),
    "return_assistant_tokens_mask",
)
"""Parameters of `apply_chat_template` that are no arguments of the template."""


TOOLS = "tools"
"""Default column with tools, which files need not have."""


class ChatTemplateConfig(Section):
    """Chat template that formats messages, and its arguments."""

    chat_template: Path | None = key(
        None,
        "File with a Jinja chat template, which replaces that of the tokenizer. Exported models contain it. null uses "
        "the template of the tokenizer.",
    )
    chat_template_kwargs: dict[str, Any] = key(
        {},
        "Arguments that the chat template receives for every row, for example {enable_thinking: false}.",
        short=("chat_template_kwargs", "arguments of the chat template"),
        alias="apply_chat_template_kwargs",
    )
    prompt_template: Text | None = key(
        None,
        "User message that a plain-text prompt becomes, with {prompt} in place of the prompt, for example '{prompt} "
        "Answer with a number.' null does not format plain text with the chat template.",
    )
    tools_key: Text | None = key(
        TOOLS,
        "Column that contains the tools of a row, which the chat template receives: a list of JSON schemas, or its "
        "JSON text. Files need not have the column tools. null reads no tools.",
    )

    def tools_columns(self, required: bool) -> list[str]:
        """Return the column with tools in a list, if it is required or optional, as `required` says."""
        return [self.tools_key] if self.tools_key and required == (self.tools_key != TOOLS) else []

    def problems(self) -> Iterator[Problem]:
        if self.chat_template is not None and not os.path.isfile(self.chat_template):
            yield Problem("chat_template", self.chat_template, f"file not found (looked in {os.getcwd()}).")
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            yield Problem("prompt_template", self.prompt_template, "has no {prompt} in place of the prompt. Add it.")
        if reserved := [name for name in _RESERVED if name in self.chat_template_kwargs]:
            message = f"contains {reserved[0]}, which is not an argument of the template. Remove it."
            yield Problem("chat_template_kwargs", self.chat_template_kwargs, message)


class DataConfig(ChatTemplateConfig):
    key_order = ("tokenizer", "train_files", "val_files", "prompt_key", *ChatTemplateConfig.model_fields)

    tokenizer: Path | None = key(
        None, "Path of the tokenizer. null uses the tokenizer of actor_rollout_ref.model.path."
    )
    train_files: Paths = key(
        None,
        "Data files with training prompts: a path, folder, glob pattern or URL (hdfs://, s3://), or a list of them. "
        "Required. The files are loaded into memory.",
        short=("data", "training prompts"),
    )
    val_files: Paths = key(
        None,
        "Data files with validation prompts, specified like train_files. null if the run does not validate.",
        short=("val_data", "validation prompts"),
    )
    prompt_key: Text = key(
        "prompt",
        "Column that contains the prompt, either a list of {role, content} messages or a string. If the files have "
        "no column prompt, messages, question, problem, instruction or query is used instead.",
    )
    prompt_id_key: Text | None = key(
        None,
        "Column that contains a prompt ID (a string or an integer). Its token IDs are added to the batch as "
        "prompt_id, and scoring functions receive the original value in extra_info. null adds no prompt IDs.",
    )
    max_prompt_id_length: Count | None = key(
        None, "Maximum length of a prompt ID in tokens. A longer ID raises an error. null sets no limit."
    )
    max_prompt_length: Annotated[Count, Auto()] = key(
        "auto",
        "Maximum prompt length in tokens, including the chat template. auto is the length of the longest prompt of the "
        "training and validation data, but at most 4096 tokens, and at most the positions of the models minus the "
        "response length.",
        short=("prompt_length", "maximum prompt length in tokens"),
    )
    max_response_length: Count = key(
        512,
        "Maximum response length in tokens. Generation stops at this length, unless rollout.response_length is "
        "smaller.",
        short=("response_length", "maximum response length in tokens"),
    )
    train_batch_size: Annotated[Count, Auto()] = key(
        "auto",
        "Number of prompts per training iteration, summed over all ranks. The rollout generates rollout.n responses "
        "per prompt. auto generates about 256 responses per iteration, or fewer if the data has fewer prompts.",
        short=("batch", "prompts per training step"),
    )
    gen_batch_size: Count | None = key(
        None,
        "Number of prompts per generation batch with algorithm.filter_groups.enable=true, summed over all ranks. "
        "null uses train_batch_size; a larger value makes up for the prompts that are dropped.",
    )
    val_batch_size: Count = key(1312, "Number of prompts per generation batch in validation, summed over all ranks.")
    return_raw_input_ids: bool = key(
        False,
        "Add the token IDs of the prompt without the chat template to the batch. A reward model with a different "
        "chat template reads them. Each prompt must consist of a single message.",
    )
    return_raw_chat: bool = key(
        False,
        "Add the messages of the prompt to the batch. A reward model with a different chat template reads them. "
        "Enabled automatically if reward_model.model.input_tokenizer requires the messages.",
    )
    truncation: Truncation = key(
        "error",
        "Handling of prompts longer than max_prompt_length. error raises an error; left, right and middle remove "
        "tokens at that position.",
        unread=DROPS_OVERLONG,
    )
    filter_overlong_prompts: bool = key(False, "Drop prompts longer than max_prompt_length when the data is loaded.")
    filter_overlong_prompts_workers: Count | None = key(
        None, "Number of processes that tokenize a large dataset. null uses one per CPU, at most 16."
    )
    shuffle: bool = key(True, "Shuffle the training prompts in every epoch.")
    seed: NonNegativeInt | None = key(
        None, "Seed for shuffling the prompts. null uses trainer.seed.", unread=NOT_SHUFFLED
    )
    reward_fn_key: Text = key(
        "data_source",
        "Column that contains the data source of each row. The data source selects the built-in scoring function and "
        "groups the validation metrics. A missing column data_source counts as unknown.",
    )
    train_max_samples: OffOrPositive = key(-1, "Maximum number of training prompts to load. -1 loads all prompts.")
    val_max_samples: OffOrPositive = key(-1, "Maximum number of validation prompts to load. -1 loads all prompts.")
    trust_remote_code: bool = key(
        "${actor_rollout_ref.model.trust_remote_code}",
        "Allow the tokenizer to execute custom Python code from its folder.",
    )

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.max_prompt_id_length is not None and self.prompt_id_key is None:
            message = (
                "has no effect without [prompt_id_key]. Set [prompt_id_key] to the column of prompt IDs, or omit "
                "[max_prompt_id_length]."
            )
            yield Problem("max_prompt_id_length", self.max_prompt_id_length, message, ("prompt_id_key",))
