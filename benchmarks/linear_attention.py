"""Training and generation with gated linear attention, compared with transformers on padded rows.

    python benchmarks/linear_attention.py --rounds 10 --out benchmarks/results/linear_attention.md

Both sides run in one process on the same weights and rows, one after the other, and the order changes from round to
round. A ratio is CPU seconds of transformers over those of camshaft, within a round: above 1 camshaft is faster.

- update: log-probs of 12 rows of 16 to 192 tokens and their backward pass. camshaft packs the rows. transformers gets
  them padded on the right with an attention mask, and computes the logits of all tokens.
- decode: 64 tokens for each of 12 prompts of 8 to 32 tokens. transformers runs `generate` on prompts padded on the
  left.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.config.engine import EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.models.loader import load_model
from camshaft.models.packing import Packing
from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_model
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

SIZES: dict[str, Any] = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": SIZES | {"num_experts": 0},
    "qwen3_5_text": SIZES,
    "olmo_hybrid": SIZES,
}
ROWS, NEW_TOKENS = 12, 64
Side = Callable[[list[Tensor]], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = ["| model | work | median ratio | smallest | largest |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for family, sizes in FAMILIES.items():
            model = make_tiny_model(Path(folder) / family, family, hidden=128, layers=4, heads=4, **sizes)
            for work, sides, lengths in (("update", updates(model), (16, 192)), ("decode", decodes(model), (8, 32))):
                ratios = [ratio(sides, rows(number, *lengths), number) for number in range(-1, options.rounds)][1:]
                numbers = (statistics.median(ratios), min(ratios), max(ratios))
                lines.append(f"| {family} | {work} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")
                print(lines[-1], flush=True)
    if options.out is not None:
        title = "# Gated linear attention: CPU seconds of transformers over those of camshaft"
        about = f"`python benchmarks/linear_attention.py --rounds {options.rounds} --threads {options.threads}`"
        options.out.write_text("\n".join([title, "", about, "", *lines, "", f"{machine()}", ""]), encoding="utf-8")


def rows(seed: int, shortest: int, longest: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed + 1)
    lengths = torch.randint(shortest, longest + 1, (ROWS,), generator=random).tolist()
    return [torch.randint(3, VOCABULARY_ROWS, (length,), generator=random) for length in lengths]


def ratio(sides: tuple[Side, Side], batch: list[Tensor], number: int) -> float:
    """Return the CPU seconds of the second side over those of the first."""
    seconds = [0.0, 0.0]
    for side in (0, 1) if number % 2 else (1, 0):
        start = time.process_time()
        sides[side](batch)
        seconds[side] = time.process_time() - start
    return seconds[1] / seconds[0]


def updates(folder: Path) -> tuple[Side, Side]:
    packed = load_model(EngineModel(path=str(folder)), "float32", "cpu", seed=0).train()
    hf: Any = AutoModelForCausalLM.from_pretrained(folder).train()

    def camshaft(batch: list[Tensor]) -> None:
        lengths = [len(row) for row in batch]
        at = torch.cat([torch.arange(1, n) + sum(lengths[:i]) for i, n in enumerate(lengths)])
        packed(torch.cat(batch), Packing(lengths), at, ("log_probs",))["log_probs"].mean().backward()

    def transformers(batch: list[Tensor]) -> None:
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
        logits = hf(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        log_probs[mask[:, 1:].bool()].mean().backward()

    return camshaft, transformers


def decodes(folder: Path) -> tuple[Side, Side]:
    hf: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    rollout = TorchRollout(RolloutEngineConfig(model_path=str(folder), max_model_len=128, max_num_seqs=ROWS))
    rollout.load_weights(hf.named_parameters())
    sampling = SamplingParams(NEW_TOKENS, ignore_eos=True)

    def camshaft(batch: list[Tensor]) -> None:
        rollout.generate_sequences(Ragged.from_rows(batch), sampling)

    def transformers(batch: list[Tensor]) -> None:
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_side="left")
        ones = [torch.ones_like(row) for row in batch]
        mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side="left")
        limits = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
        hf.generate(ids, attention_mask=mask, do_sample=True, top_k=0, **limits)

    return camshaft, transformers


if __name__ == "__main__":
    main()
