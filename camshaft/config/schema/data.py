"""Section `data` of RL runs: prompt files, length limits and batch sizes."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from camshaft.config.schema.fields import Auto, Count, OffOrPositive, Path, Paths, Section, Text

Truncation = Literal["error", "left", "right", "middle"]


class DataConfig(Section):
    tokenizer: Path | None = Field(
        description="Path of the tokenizer. null uses the tokenizer of actor_rollout_ref.model.path."
    )
    train_files: Paths = Field(
        description="Data files with training prompts: a path, folder, glob pattern or URL, or a list of them. The "
        "files are loaded into memory."
    )
    val_files: Paths = Field(
        description="Data files with validation prompts, specified like train_files. null if the run does not validate."
    )
    prompt_key: Text = Field(
        description="Column that contains the prompt, either a list of {role, content} messages or a string. If the "
        "files have no column prompt, messages, question, problem, instruction or query is used instead."
    )
    prompt_id_key: Text | None = Field(
        description="Column that contains a prompt ID (a string or an integer). Its token IDs are added to the batch "
        "as prompt_id, and scoring functions receive the original value in extra_info. null adds no prompt IDs."
    )
    max_prompt_id_length: Count | None = Field(
        description="Maximum length of a prompt ID in tokens. A longer ID raises an error. null sets no limit."
    )
    max_prompt_length: Count = Field(description="Maximum prompt length in tokens, including the chat template.")
    max_response_length: Count = Field(
        description="Maximum response length in tokens. Generation stops at this length, unless "
        "rollout.response_length is smaller.",
    )
    train_batch_size: Annotated[Count, Auto()] = Field(
        description="Number of prompts per training iteration, summed over all ranks. The rollout generates rollout.n "
        "responses per prompt. auto generates about 256 responses per iteration, or fewer if the data has fewer "
        "prompts.",
    )
    gen_batch_size: Count | None = Field(
        description="Number of prompts per generation batch with algorithm.filter_groups.enable=true, summed over all "
        "ranks. null uses train_batch_size.",
    )
    val_batch_size: Count = Field(
        description="Number of prompts per generation batch in validation, summed over all ranks."
    )
    return_raw_input_ids: bool = Field(
        description="Add the token IDs of the prompt without the chat template to the batch. A reward model with a "
        "different chat template reads them. Each prompt must consist of a single message."
    )
    return_raw_chat: bool = Field(
        description="Add the messages of the prompt to the batch. A reward model with a different chat template reads "
        "them. Enabled automatically if reward_model.model.input_tokenizer requires the messages."
    )
    truncation: Truncation = Field(
        description="Handling of prompts longer than max_prompt_length. error raises an error; left, right and middle "
        "remove tokens at that position."
    )
    filter_overlong_prompts: bool = Field(
        description="Drop prompts longer than max_prompt_length when the data is loaded."
    )
    filter_overlong_prompts_workers: Count | None = Field(
        description="Number of processes that tokenize a large dataset. null uses one per CPU, at most 16."
    )
    shuffle: bool = Field(description="Shuffle the training prompts in every epoch.")
    seed: NonNegativeInt | None = Field(description="Seed for shuffling the prompts. null uses trainer.seed.")
    reward_fn_key: Text = Field(
        description="Column that contains the data source of each row. The data source selects the built-in scoring "
        "function and groups the validation metrics. A missing column data_source counts as unknown."
    )
    train_max_samples: OffOrPositive = Field(
        description="Maximum number of training prompts to load. -1 loads all prompts."
    )
    val_max_samples: OffOrPositive = Field(
        description="Maximum number of validation prompts to load. -1 loads all prompts."
    )
    trust_remote_code: bool = Field(description="Allow the tokenizer to execute custom Python code from its folder.")
