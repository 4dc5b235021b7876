"""Section `data` of RL runs: prompt files, length limits and batch sizes."""

from typing import Literal

from pydantic import Field

from camshaft.config.schema.fields import OffOrPositive, Path, Paths, Section, Text

Truncation = Literal["error", "left", "right", "middle"]


class DataConfig(Section):
    """Prompts, length limits and batch sizes."""

    tokenizer: Path | None = Field(description="Path of the tokenizer; null uses the actor model's.")
    train_files: Paths = Field(
        description="Parquet files with training prompts, read into memory: paths, folders, glob patterns or URLs."
    )
    val_files: Paths = Field(description="Parquet files with validation prompts; null for none.")
    prompt_key: Text = Field(description="Column with the prompt: a list of {role, content} messages, or a string.")
    prompt_id_key: Text | None = Field(
        description="Column with a prompt id, a string or an integer. The batch contains its token ids as prompt_id; "
        "scoring functions receive the original value in extra_info. null for none."
    )
    max_prompt_id_length: int | None = Field(
        ge=1, description="Maximum prompt id length in tokens; longer ids are an error. null for no limit."
    )
    max_prompt_length: int = Field(ge=1, description="Maximum prompt length in tokens, including the chat template.")
    max_response_length: int = Field(ge=1, description="Maximum response length in tokens; generation stops there.")
    train_batch_size: int = Field(
        ge=1, description="Prompts per iteration over all ranks; each has rollout.n responses."
    )
    gen_batch_size: int | None = Field(
        ge=1,
        description="Prompts per generation batch with algorithm.filter_groups.enable=true, over all ranks; null: "
        "train_batch_size.",
    )
    val_batch_size: int = Field(ge=1, description="Prompts per generation batch in validation, over all ranks.")
    return_raw_input_ids: bool = Field(
        description="Keep the token ids of the prompt text without the chat template, for a reward model with another "
        "template. Requires prompts of one message."
    )
    return_raw_chat: bool = Field(
        description="Keep the prompt's messages, for a reward model with another chat template. Always on if "
        "reward_model.model.input_tokenizer requires them."
    )
    truncation: Truncation = Field(
        description="Handling of prompts longer than max_prompt_length: raise an error, or truncate at that side."
    )
    filter_overlong_prompts: bool = Field(description="Drop prompts longer than max_prompt_length before training.")
    filter_overlong_prompts_workers: int | None = Field(
        ge=1, description="Processes that tokenize large data sets; null: one per CPU, at most 16."
    )
    shuffle: bool = Field(description="Shuffle the training prompts every epoch.")
    seed: int | None = Field(ge=0, description="Seed of the shuffle; null uses trainer.seed.")
    reward_fn_key: Text = Field(description="Column with the data source of a row; selects the scoring function.")
    train_max_samples: OffOrPositive = Field(description="Maximum number of training prompts to read; -1 reads all.")
    val_max_samples: OffOrPositive = Field(description="Maximum number of validation prompts to read; -1 reads all.")
    trust_remote_code: bool = Field(description="Allow the tokenizer to run Python code from its folder.")
