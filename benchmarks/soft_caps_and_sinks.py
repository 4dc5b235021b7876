"""CPU time of models with soft-caps and attention sinks, beside the code of transformers.

    OMP_NUM_THREADS=1 python benchmarks/soft_caps_and_sinks.py --out benchmarks/results/soft_caps_and_sinks.md

- update: log-probs and entropies of packed rows, and the backward pass, without an optimizer step. transformers: one
  call of the model on padded rows with its "eager" attention, `log_softmax`, and the backward pass.
- decode: 64 tokens for each of 32 prompts. transformers: `generate` with its cache, through `rollout.name=hf`.

Both sides run in turns in one process, on the same weights and rows. The ratio is the median over the rounds: above 1
camshaft is faster.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from camshaft.config.engine import EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.models.loader import load_model
from camshaft.models.packing import Packing
from camshaft.models.tiny import make_tiny_model
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.hf import HFRollout

Side = Callable[[], Any]
WINDOWED: dict[str, Any] = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {**WINDOWED, "query_pre_attn_scalar": 32},
    "gpt_oss": {
        **WINDOWED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
SIZES: dict[str, Any] = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2}
LENGTHS: dict[str, list[int]] = {"32 rows of 20 to 144 tokens": list(range(20, 148, 4)), "2 rows of 1024": [1024] * 2}


def rows_of(lengths: list[int]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(3, 100, (length,), generator=random) for length in lengths]


def packed_update(folder: Path, lengths: list[int]) -> Side:
    model = load_model(EngineModel(path=str(folder)), "float32", "cpu", 0).train()
    rows, packing = rows_of(lengths), Packing(lengths)
    tokens = torch.cat(rows)
    at = torch.ones(len(tokens), dtype=torch.bool).index_fill(0, packing.starts, False).nonzero()[:, 0]

    def update() -> None:
        model.zero_grad()
        out = model(tokens, packing, at, ("log_probs", "entropy"))
        (out["log_probs"].sum() + out["entropy"].sum()).backward()

    return update


def padded_update(folder: Path, lengths: list[int]) -> Side:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).train()
    rows = rows_of(lengths)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)

    def update() -> None:
        model.zero_grad()
        log_p = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].log_softmax(-1)
        log_probs = log_p.gather(2, ids[:, 1:, None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        ((log_probs + entropy) * mask[:, 1:]).sum().backward()

    return update


def decode(rollout_class: Any, folder: Path) -> Side:
    rollout = rollout_class(RolloutEngineConfig(model_path=str(folder), max_model_len=128, max_num_seqs=32))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rollout.load_weights(list(model.named_parameters()))
    prompts = Ragged.from_rows(rows_of(list(range(4, 36))), torch.int64)
    sampling = SamplingParams(64, ignore_eos=True)
    return lambda: rollout.generate_sequences(prompts, sampling, torch.arange(32))


def ratio(camshaft: Side, transformers: Side, rounds: int) -> tuple[float, float]:
    """Return the median CPU seconds of camshaft and the median ratio."""
    seconds = {camshaft: [], transformers: []}
    for side in seconds:
        side()
    for number in range(rounds):
        for side in (camshaft, transformers) if number % 2 else (transformers, camshaft):
            start = time.process_time()
            side()
            seconds[side].append(time.process_time() - start)
    pairs = zip(seconds[transformers], seconds[camshaft], strict=True)
    return statistics.median(seconds[camshaft]), statistics.median(slow / fast for slow, fast in pairs)


def cases(folder: Path) -> dict[str, tuple[Side, Side]]:
    updates = {
        f"update, {name}": (packed_update(folder, lengths), padded_update(folder, lengths))
        for name, lengths in LENGTHS.items()
    }
    return {**updates, "decode, 32 rows, 64 tokens": (decode(TorchRollout, folder), decode(HFRollout, folder))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| family | work | CPU seconds | transformers / camshaft |", "|---|---|---|---|"]
    for family, options in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            make_tiny_model(folder, family, **SIZES, **options)
            for name, sides in cases(Path(folder)).items():
                seconds, faster = ratio(*sides, args.rounds)
                lines.append(f"| {family} | {name} | {seconds:.3f} | {faster:.2f} |")
                print(lines[-1], flush=True)
    if args.out is not None:
        intro = "# Soft-caps and attention sinks beside transformers\n\nBy `benchmarks/soft_caps_and_sinks.py`, "
        sizes = "4 layers of width 128 with alternating windows of 64 tokens, float32, one thread of a CPU"
        args.out.write_text(f"{intro}{args.rounds} paired\nrounds: {sizes}.\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
