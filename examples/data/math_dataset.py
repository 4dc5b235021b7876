r"""Convert MATH to prompts with verifiable answers.

    python examples/data/math_dataset.py --local_dir downloads/math --out data/math

`--local_dir` is a copy of DigitalLearningGmbH/MATH-lighteval from the hub (data/train-00000-of-00001.parquet, ...) or
of HuggingFaceH4/MATH-500 (test.jsonl; --data_source HuggingFaceH4/MATH-500). Rows have a `problem` and a `solution`
with the answer in its last \boxed{}. The reward function `math` scores both data sets.
"""

import argparse
import sys
from typing import Any

from camshaft.data.raw import read_splits
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError, CamshaftError, report_error

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...} (or after "\boxed ", up to a $), with nested braces."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip() or None
    depth = 0
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:place].strip() or None
    return None


def row(raw: dict[str, Any], split: str, index: int, data_source: str) -> dict[str, Any]:
    answer = last_boxed(raw["solution"])
    if answer is None:
        raise BatchError(f"{split}, row {index}: the solution has no \\boxed{{answer}}: ...{raw['solution'][-60:]!r}")
    about = {name: str(raw.get(name) or "") for name in ("level", "type", "subject")}
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{raw['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, **about},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", required=True, help="folder with the raw files")
    parser.add_argument("--out", required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--data_source", default="DigitalLearningGmbH/MATH-lighteval", help="what rows are from")
    options = parser.parse_args(arguments)
    try:
        splits = read_splits(options.local_dir, ["problem", "solution"], ["level", "type", "subject"])
        for split, rows in splits.items():
            records = [row(raw, split, index, options.data_source) for index, raw in enumerate(rows)]
            print(f"{write_parquet(f'{options.out}/{split}.parquet', records)}: {len(records)} rows")
    except CamshaftError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
