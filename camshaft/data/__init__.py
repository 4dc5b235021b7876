"""Data: parquet files in, batches of token ids out.

    rows = load_prompts(["train.parquet"], tokenizer, PromptOptions(max_prompt_length=512))
    loader = StatefulLoader(rows.batch, batch_size=256, seed=1, total_epochs=15)
    for batch in loader: ...              # prompts, uid, data_source, ground_truth, extra_info

`parquet.py` reads files, `chat.py` turns messages and text into ids, `prompts.py`, `sft.py` and `preferences.py` make
the columns, `loader.py` deals them out and can resume anywhere, `responses.py` writes what was generated, `tasks.py`
writes small data sets. Rows have the ecosystem's format: `data_source`, `prompt`, `reward_model.ground_truth`,
`extra_info`. The trainers import from here; nothing here knows of engines or roles.
"""

from camshaft.data.loader import StatefulLoader
from camshaft.data.preferences import PreferenceOptions, PreferenceSet, load_preferences
from camshaft.data.prompts import PromptOptions, PromptSet, load_prompts
from camshaft.data.responses import ResponseFile
from camshaft.data.sft import SFTOptions, SFTSet, load_sft
from camshaft.data.tasks import ArithmeticPaths, write_arithmetic

__all__ = [
    "ArithmeticPaths",
    "PreferenceOptions",
    "PreferenceSet",
    "PromptOptions",
    "PromptSet",
    "ResponseFile",
    "SFTOptions",
    "SFTSet",
    "StatefulLoader",
    "load_preferences",
    "load_prompts",
    "load_sft",
    "write_arithmetic",
]
