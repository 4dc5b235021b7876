"""Data loading: read data files and build batches of token ids.

    rows = load_prompts(["train.parquet"], tokenizer, PromptOptions(max_prompt_length=512))
    loader = StatefulLoader(rows.batch, batch_size=256, seed=1, total_epochs=15)
    for batch in loader: ...    # columns prompts, uid, data_source, ground_truth, extra_info

Modules:

    files.py            resolves files, folders, glob patterns and URLs to local files
    hub_datasets.py     reads data sets of the Hugging Face Hub by name
    formats.py          opens parquet, JSON, CSV and Arrow files
    tables.py           reads data files as Python rows
    chat.py             applies chat templates, tokenizes, truncates
    unread.py           names columns that a run should perhaps read
    tokens.py           tokenizes many prompts in parallel processes, with a cache on disk
    prompts.py          loads prompts for RL
    sft.py              loads sequences for supervised fine-tuning
    preferences.py      loads preference pairs for reward model training
    loader.py           returns shuffled batches over several epochs and resumes at any row
    check.py            computes statistics of data files for `camshaft check-data`
    responses.py        writes generated responses
    answers.py          reads existing responses for `camshaft eval`
    raw.py              reads data sets in the files that their authors publish
    tasks.py            generates small arithmetic data sets
    reasoning_gym.py    generates data sets from reasoning-gym tasks

Data files have the columns of verl: `data_source`, `prompt`, `reward_model.ground_truth` and `extra_info`. The trainers
use this package. It does not depend on engines or roles.
"""

from camshaft.data.chat import encode_prompts
from camshaft.data.check import count_repeated, count_shared, summarize_files, summarize_lengths
from camshaft.data.files import data_files
from camshaft.data.loader import StatefulLoader
from camshaft.data.preferences import PreferenceOptions, PreferenceSet, load_preferences
from camshaft.data.prompts import (
    OPTIONAL,
    PromptOptions,
    PromptSet,
    TokenizedPrompts,
    build_prompt_set,
    load_prompts,
    read_prompts,
)
from camshaft.data.responses import ResponseFile
from camshaft.data.sft import SFTOptions, SFTSet, load_sft
from camshaft.data.tasks import ArithmeticPaths, write_arithmetic

__all__ = [
    "OPTIONAL", "ArithmeticPaths", "PreferenceOptions", "PreferenceSet", "PromptOptions", "PromptSet",
    "TokenizedPrompts", "ResponseFile", "SFTOptions", "SFTSet", "StatefulLoader", "build_prompt_set", "data_files",
    "encode_prompts", "summarize_files", "summarize_lengths", "load_preferences", "load_prompts", "load_sft",
    "count_repeated", "count_shared", "read_prompts", "write_arithmetic",
]  # fmt: skip
