"""Compose command lines of verl, and print which of them become a valid config.

    python tools/foreign_lines.py lines.jsonl

A line of the file is an object with `name`, `kind` and `args`, the arguments of a training command. The files that a
line names are made up: data, scoring functions, and model folders whose layers, heads and experts its parallel sizes
divide. A line whose parallel sizes do not divide its devices gets more machines. Whether the libraries of a line are
installed is not checked.
"""

import argparse
import json
import logging
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from camshaft.config import load_ppo  # noqa: E402
from camshaft.errors import ConfigError  # noqa: E402
from camshaft.machine import LIBRARIES, Machine  # noqa: E402

DEVICES = 8
"""Devices per machine of a line that does not set them."""
LAYERS = "actor_rollout_ref.actor.megatron.override_transformer_config."
"""Prefix of the keys of uneven pipeline stages."""
DATA = ("data.train_files", "data.val_files")
MODELS = ("actor_rollout_ref.model.path", "critic.model.path")
REWARD_MODELS = ("reward.reward_model.model_path", "reward_model.model.path")
FUNCTIONS = ("reward.custom_reward_function.path", "custom_reward_function.path")
FAMILIES = {"qwen2": r"qwen-?2", "qwen3_moe": r"\d+b[_-]a\d+b|_moe|moonlight|deepseek|gpt_oss|35b|397b"}
"""Families of the made-up models, with patterns of names of lines. Other lines get a qwen3 model."""


class Result(NamedTuple):
    """Whether a line becomes a valid config."""

    name: str
    kind: str
    devices: str
    error: str
    """Message of the error. Empty for a valid config."""


class Line(NamedTuple):
    """A command line."""

    name: str
    kind: str
    args: list[str]

    def number(self, key: str, default: int = 1) -> int:
        """Return the value of a key that is an integer."""
        pairs = (argument.lstrip("+").partition("=") for argument in self.args)
        return next((int(value) for name, _, value in pairs if name == key and value.isdigit()), default)

    def size(self, kind: str) -> int:
        """Return a parallel size of Megatron that divides those of actor and reference."""
        sizes = (self.number(f"actor_rollout_ref.{role}.megatron.{kind}_parallel_size") for role in ("actor", "ref"))
        return math.lcm(*sizes)

    def machines(self) -> tuple[int, int]:
        """Return the number of machines and of devices per machine, so that all parallel sizes divide the devices."""
        machines, devices = self.number("trainer.nnodes"), self.number("trainer.n_gpus_per_node", DEVICES)
        row = self.size("tensor_model") * self.size("pipeline_model") * self.size("context")
        rollout = self.number("actor_rollout_ref.rollout.tensor_model_parallel_size")
        group = math.lcm(row, self.size("pipeline_model") * self.size("expert_model"), rollout)
        return math.lcm(machines * devices, group) // devices if machines * devices % group else machines, devices


def compose_lines(lines: Iterable[Line]) -> Iterator[Result]:
    """Compose each line with the files that it names made up."""
    with tempfile.TemporaryDirectory() as folder:
        for index, line in enumerate(lines):
            own = Path(folder) / str(index)
            own.mkdir()
            machines, devices = line.machines()
            words = [*_with_files(line, own), f"trainer.nnodes={machines}", f"trainer.n_gpus_per_node={devices}"]
            try:
                load_ppo(words, *_config_file(line.args), machine=Machine("cuda", devices, frozenset(LIBRARIES)))
                error = ""
            except ConfigError as caught:
                error = str(caught)
            yield Result(line.name, line.kind, f"{machines} x {devices}", error)


def _config_file(args: Iterable[str]) -> tuple[str | None, str | None]:
    """Return the values of `--config-path` and `--config-name`."""
    options = dict(argument.split("=", 1) for argument in args if argument.startswith("--"))
    return options.get("--config-path"), options.get("--config-name")


def _with_files(line: Line, folder: Path) -> Iterator[str]:
    """Yield the overrides of a line with files that exist."""
    (folder / "data.parquet").touch()
    (folder / "score.py").write_text("def compute_score(**columns):\n    return 0.0\n")
    model = _write_model(folder / "model", line, "ForCausalLM")
    reward_model = _write_model(folder / "reward_model", line, "ForSequenceClassification")
    files = dict.fromkeys(DATA, folder / "data.parquet") | dict.fromkeys(MODELS, model)
    files |= dict.fromkeys(REWARD_MODELS, reward_model) | dict.fromkeys(FUNCTIONS, folder / "score.py")
    for argument in line.args:
        key, _, _ = argument.lstrip("+").partition("=")
        if not argument.startswith("--") and key not in ("trainer.nnodes", "trainer.n_gpus_per_node"):
            yield f"{key}={files[key]}" if key in files else argument


def _write_model(folder: Path, line: Line, head: str) -> Path:
    """Write the config.json of a model that the parallel sizes of a line divide."""
    family = next((family for family, words in FAMILIES.items() if re.search(words, line.name.lower())), "qwen3")
    stages = line.size("pipeline_model") * line.size("virtual_pipeline_model")
    ends = [line.number(f"{LAYERS}num_layers_in_{end}_pipeline_stage", 0) for end in ("first", "last")]
    layers = sum(ends) + stages - sum(1 for end in ends if end)
    heads = math.lcm(line.size("tensor_model"), line.size("context"), 8)
    values: dict[str, Any] = {
        "model_type": family, "architectures": [f"{''.join(map(str.title, family.split('_')))}{head}"],
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "hidden_size": 8 * heads, "intermediate_size": 16 * heads, "vocab_size": 512, "eos_token_id": 1,
        "max_position_embeddings": 2**20,
    }  # fmt: skip
    if family == "qwen3_moe":
        values |= {"num_experts": 8 * line.size("expert_model"), "num_experts_per_tok": 2}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def _problems(error: str) -> list[str]:
    """Return each problem of an error as one line."""
    blocks = [block.split("\n", 1) for block in error.split("\n\n") if block.startswith("  ")]
    return [f"{head.strip()}: {' '.join(rest[0].split()) if rest else ''}" for head, *rest in blocks] or [error]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--problems", action="store_true", help="print all problems of each line")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    lines = [Line(**json.loads(text)) for text in arguments.lines.read_text("utf-8").splitlines()]
    results = list(compose_lines(lines))
    for name, kind, devices, error in results:
        problems = _problems(error) if error else ["valid"]
        sys.stdout.write(f"{kind:<22} {devices:>7}  {name}\n")
        sys.stdout.writelines(
            f"{'':<33}{problem[:400]}\n" for problem in (problems if arguments.problems else problems[:1])
        )
    totals = Counter(result.kind for result in results)
    valid = Counter(result.kind for result in results if not result.error)
    sys.stdout.writelines(f"{kind:<22} {valid[kind]:>2} of {count} valid\n" for kind, count in totals.items())


if __name__ == "__main__":
    main()
