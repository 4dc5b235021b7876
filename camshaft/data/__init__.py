"""Data: parquet files in, batches of token ids out.

    rows = load_prompts(["train.parquet"], tokenizer, PromptOptions(max_prompt_length=512))
    loader = StatefulLoader(rows.batch, batch_size=256, seed=1, total_epochs=15)
    for batch in loader: ...              # prompts, uid, data_source, ground_truth, extra_info

`files.py` says which files, `parquet.py` reads them, `chat.py` turns messages and text into ids, `tokens.py` does so
for many, `prompts.py`, `sft.py` and `preferences.py` make the columns, `loader.py` deals them out and can resume
anywhere, `check.py` counts what is in them, `responses.py` writes what was generated, `tasks.py` writes small data
sets. Rows have the ecosystem's format: `data_source`, `prompt`, `reward_model.ground_truth`, `extra_info`. The trainers
import from here; nothing here knows of engines or roles.
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
