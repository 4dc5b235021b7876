"""Convert HH-RLHF to prompts and preference pairs.

    python examples/data/hh.py --local_dir downloads/hh-rlhf --out data/hh

`--local_dir` is a copy of Anthropic/hh-rlhf from the hub (helpful-base/train.jsonl.gz, ...: full dialogues `chosen` and
`rejected`) or of Dahoas/full-hh-rlhf (data/train-00000-of-00001.parquet, ...: `prompt`, and the last turns `chosen` and
`rejected`). Each split yields two files:
  <split>.parquet        `prompt` as messages, for PPO with a reward model (custom_reward_function.name=null)
  <split>_pairs.parquet  `prompt`, `chosen`, `rejected` as messages, for training a reward model
Pairs whose dialogues do not share a prompt and end in an assistant turn are dropped and counted.
"""

import argparse
import re
import sys
from typing import Any

from camshaft.data.raw import read_splits
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError, CamshaftError, report_error

DATA_SOURCE = "Anthropic/hh-rlhf"
ROLES = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")

Messages = list[dict[str, str]]


def messages(dialogue: str) -> Messages:
    """Parse `\\n\\nHuman: Hello\\n\\nAssistant: Hi` into messages; consecutive turns of one speaker are merged."""
    _, *parts = TURN.split(dialogue)
    turns: Messages = []
    for speaker, text in zip(parts[::2], parts[1::2], strict=True):
        if turns and turns[-1]["role"] == ROLES[speaker]:
            turns[-1]["content"] += f"\n\n{text.strip()}"
        else:
            turns.append({"role": ROLES[speaker], "content": text.strip()})
    return turns


def pair(raw: dict[str, Any]) -> dict[str, Messages] | None:
    """(prompt, chosen, rejected) as messages, or None if the two do not answer the same."""
    before = raw.get("prompt") or ""
    if before and not before.rstrip().endswith("Assistant:"):
        before += "\n\nAssistant:"
    chosen, rejected = (messages(f"{before} {raw[name]}" if before else raw[name]) for name in ("chosen", "rejected"))
    ends = [turns[-1] if turns else None for turns in (chosen, rejected)]
    if not all(end and end["role"] == "assistant" and end["content"] for end in ends):
        return None
    prompt = chosen[:-1]
    if not prompt or prompt != rejected[:-1] or not all(turn["content"] for turn in prompt):
        return None
    return {"prompt": prompt, "chosen": chosen[-1:], "rejected": rejected[-1:]}


def row(dialogues: dict[str, Messages], split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": dialogues["prompt"],
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": dialogues["chosen"][0]["content"]},
        "extra_info": {"split": split, "index": index},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", required=True, help="folder with the raw files")
    parser.add_argument("--out", required=True, help="folder for the parquet files")
    options = parser.parse_args(arguments)
    try:
        for split, rows in read_splits(options.local_dir, ["chosen", "rejected"], ["prompt"]).items():
            pairs = [item for item in map(pair, rows) if item is not None]
            if not pairs:
                raise BatchError(
                    f"{split}: none of {len(rows)} rows is a pair of dialogues; a dialogue looks like "
                    "'\\n\\nHuman: ...\\n\\nAssistant: ...'"
                )
            prompts = [row(item, split, index) for index, item in enumerate(pairs)]
            print(f"{write_parquet(f'{options.out}/{split}.parquet', prompts)}: {len(prompts)} rows")
            print(f"{write_parquet(f'{options.out}/{split}_pairs.parquet', pairs)}: {len(pairs)} rows")
            if len(pairs) < len(rows):
                print(f"{split}: {len(rows) - len(pairs)} of {len(rows)} rows left out, which are no pairs")
    except CamshaftError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
