"""Section `data` of RL runs: which prompts are read, how long they may be, how many make an iteration."""

from typing import Literal

from pydantic import Field

from camshaft.config.schema.fields import OffOrPositive, Path, Paths, Section, Text

Truncation = Literal["error", "left", "right", "middle"]


class DataConfig(Section):
    """Prompts, their lengths and the batch sizes."""

    tokenizer: Path | None = Field(description="Folder of the tokenizer; null takes the actor model's.")
    train_files: Paths = Field(
        description="Parquet files with the training prompts, read whole: paths, folders, patterns or URLs."
    )
    val_files: Paths = Field(description="Parquet files with the validation prompts; null for none.")
    prompt_key: Text = Field(description="Column with the prompt: a list of {role, content} messages, or raw text.")
    prompt_id_key: Text | None = Field(
        description="Column with an id of the prompt, text or a whole number. Its token ids travel with the prompt as "
        "prompt_id, and scoring functions find it as it is in extra_info; null for none."
    )
    max_prompt_id_length: int | None = Field(
        ge=1, description="Longest prompt id in tokens; a longer one is an error; null for no limit."
    )
    max_prompt_length: int = Field(ge=1, description="Longest prompt in tokens, chat template included.")
    max_response_length: int = Field(ge=1, description="Longest response in tokens; generation stops there.")
    train_batch_size: int = Field(ge=1, description="Prompts per iteration, over all ranks; each brings rollout.n.")
    gen_batch_size: int | None = Field(
        ge=1,
        description="Prompts generated together where algorithm.filter_groups.enable=true, over all ranks; null: "
        "train_batch_size.",
    )
    val_batch_size: int = Field(ge=1, description="Prompts generated together in validation, over all ranks.")
    return_raw_input_ids: bool = Field(
        description="Keep the ids of the prompt's text without chat template, for a reward model with another one; "
        "prompts of one message."
    )
    return_raw_chat: bool = Field(
        description="Keep the prompt's messages, for a reward model with another chat template; they are kept anyway "
        "where reward_model.model.input_tokenizer needs them."
    )
    truncation: Truncation = Field(
        description="A prompt longer than max_prompt_length: an error, or cut at the left, the right or the middle."
    )
    filter_overlong_prompts: bool = Field(description="Drop prompts longer than max_prompt_length before training.")
    filter_overlong_prompts_workers: int | None = Field(
        ge=1, description="Processes that tokenise large sets, to filter and to train; null: one per CPU, 16 at most."
    )
    shuffle: bool = Field(description="Draw the training prompts in a new order every epoch.")
    seed: int | None = Field(ge=0, description="Seed of that order; null takes trainer.seed.")
    reward_fn_key: Text = Field(description="Column with the name of a row's data set; picks the scoring function.")
    train_max_samples: OffOrPositive = Field(description="Read at most so many training prompts; -1 reads all.")
    val_max_samples: OffOrPositive = Field(description="Read at most so many validation prompts; -1 reads all.")
    trust_remote_code: bool = Field(description="Let the tokenizer run Python code from its own folder.")
