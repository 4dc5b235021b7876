"""Play scripted answers with the trainer of TRL, and print transcripts, tokens and scores as JSON.

python play_trl.py FOLDER CLASS          # model, tokenizer and answers are in the folder
"""

# pyright: reportMissingImports=false
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import environments
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

folder, name = sys.argv[1:]
rows = json.loads((Path(folder) / "rows.json").read_text())[name]
tokenizer = AutoTokenizer.from_pretrained(folder)
played = {}


def record(prompts: Any, completions: Any, completion_ids: Any, environments: Any, **_: Any) -> list[float]:
    scores = [float(e.get_reward() if hasattr(e, "get_reward") else e.reward) for e in environments]
    for prompt, completion, ids, score in zip(prompts, completions, completion_ids, scores, strict=True):
        played[prompt[0]["content"]] = {"messages": [*prompt, *completion], "tokens": list(ids), "score": score}
    return scores


class Scripted(GRPOTrainer):
    """A trainer whose policy says what a script prescribes for the row and the number of earlier answers."""

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        texts = [tokenizer.decode(ids) for ids in prompt_ids]
        turns = [(int(text.split("Row ")[1].split(".")[0]), text.count("<|im_start|>assistant") - 1) for text in texts]
        return [tokenizer.encode(rows[row]["answers"][turn]) for row, turn in turns], None


logging.disable(logging.WARNING)
data = Dataset.from_list([{"prompt": row["prompt"], "target": row["target"]} for row in rows])
with tempfile.TemporaryDirectory() as output:
    config = GRPOConfig(
        output,
        per_device_train_batch_size=2 * len(rows),
        num_generations=2,
        max_steps=1,
        max_completion_length=1500,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    options: dict[str, Any] = {"environment_factory": getattr(environments, name), "processing_class": tokenizer}
    Scripted(folder, record, args=config, train_dataset=data, **options).train()
sys.stdout.write("PLAYED" + json.dumps([played[key] for key in sorted(played)]))
