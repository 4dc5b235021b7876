"""Convert GSM8K to prompts with verifiable answers.

    python examples/data/gsm8k.py --local_dir downloads/gsm8k --out data/gsm8k

`--local_dir` is a copy of openai/gsm8k from the hub (main/train-00000-of-00001.parquet, ...; the `socratic` subset is
ignored) or of the authors' repository (train.jsonl, test.jsonl). Rows have a `question` and an `answer` that ends in
`#### <number>`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from camshaft.data.raw import read_splits
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError, CamshaftError, report_error

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    _, mark, answer = raw["answer"].rpartition("####")
    if not mark:
        raise BatchError(f"{split}, row {index}: the answer has no '####': ...{raw['answer'][-60:]!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{raw['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": raw["question"], "answer": raw["answer"]},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", required=True, help="folder with the raw files")
    parser.add_argument("--out", required=True, help="folder for train.parquet and test.parquet")
    options = parser.parse_args(arguments)
    try:
        main_set = Path(options.local_dir).expanduser() / "main"
        folder = main_set if main_set.is_dir() else options.local_dir
        for split, rows in read_splits(folder, ["question", "answer"]).items():
            records = [row(raw, split, index) for index, raw in enumerate(rows)]
            print(f"{write_parquet(f'{options.out}/{split}.parquet', records)}: {len(records)} rows")
    except CamshaftError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
