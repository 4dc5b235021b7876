"""Data: read parquet files and build batches of token ids.

    rows = load_prompts(["train.parquet"], tokenizer, PromptOptions(max_prompt_length=512))
    loader = StatefulLoader(rows.batch, batch_size=256, seed=1, total_epochs=15)
    for batch in loader: ...              # prompts, uid, data_source, ground_truth, extra_info

Modules:

    files.py            resolve files, folders, glob patterns and URLs to local parquet files
    parquet.py          read parquet files as Python rows
    chat.py             apply chat templates, tokenize, truncate
    tokens.py           tokenize many prompts in parallel, with a cache
    prompts.py          columns of RL runs
    sft.py              columns of supervised fine-tuning
    preferences.py      columns of reward model training
    loader.py           shuffled batches over epochs, resumable at any row
    check.py            statistics of data files for `camshaft check-data`
    responses.py        write generated responses
    answers.py          read existing responses for `camshaft eval`
    raw.py              read data sets as their authors publish them
    tasks.py            generate small arithmetic data sets
    reasoning_gym.py    generate data sets from reasoning-gym tasks

Rows use the format of verl: `data_source`, `prompt`, `reward_model.ground_truth`, `extra_info`. The trainers use this
package; it does not depend on engines or roles.
"""

from camshaft.data.check import file_facts, length_facts, num_repeated, num_shared
from camshaft.data.files import data_files
from camshaft.data.loader import StatefulLoader
from camshaft.data.preferences import PreferenceOptions, PreferenceSet, load_preferences
from camshaft.data.prompts import OPTIONAL, PromptOptions, PromptSet, ReadPrompts, arrange, load_prompts, read_prompts
from camshaft.data.responses import ResponseFile
from camshaft.data.sft import SFTOptions, SFTSet, load_sft
from camshaft.data.tasks import ArithmeticPaths, write_arithmetic

__all__ = [
    "OPTIONAL",
    "ArithmeticPaths",
    "PreferenceOptions",
    "PreferenceSet",
    "PromptOptions",
    "PromptSet",
    "ReadPrompts",
    "ResponseFile",
    "SFTOptions",
    "SFTSet",
    "StatefulLoader",
    "arrange",
    "data_files",
    "file_facts",
    "length_facts",
    "load_preferences",
    "load_prompts",
    "load_sft",
    "num_repeated",
    "num_shared",
    "read_prompts",
    "write_arithmetic",
]
