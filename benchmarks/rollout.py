"""Speed of the built-in generator compared with transformers.generate and vLLM, in one process and in turns.

    python benchmarks/rollout.py --out benchmarks/results/rollout.md
    python benchmarks/rollout.py --engines torch,hf --models 27M --prompts 264 --rounds 12

Each round has different prompts and response limits (8 prompts x 8 samples; limits are exponentially distributed with a
mean of a third of the maximum). All engines use the same ones and take turns in changing order. Every row runs to its
limit.

- torch: the built-in generator. The time includes `load_weights` of weights that have just changed.
- hf: `transformers.generate` on all rows at once, unmodified. It returns no log-probs; the others do.
- vllm: `LLM.generate`, if vLLM is installed. Its prefix cache is reset before each round, as after a weight update; the
  time to load the weights is not included.

Other work on the machine slows all engines alike, so ratios within a round are the reported result. CPU time covers
all threads of the process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import roofline
import torch
import transformers
from machine import machine
from workload import Shape

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.models.tiny import make_tiny_model
from camshaft.ragged import Ragged
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

MODELS = {
    "1M": Shape(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384, vocab_size=512),
    "3M": Shape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=768, vocab_size=512),
    "27M": Shape(hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1536, vocab_size=4096),
}
PROMPTS, SAMPLES, LONGEST = 8, 8, 128
SEED = 7


@dataclass(frozen=True)
class Work:
    """Prompts and response limits of one round, the same for all engines."""

    prompts: Ragged
    limits: torch.Tensor


@dataclass(frozen=True)
class Spent:
    """Wall and CPU seconds of one engine in one round."""

    wall: float
    cpu: float


def work_of(round_number: int, prompt_length: int, vocabulary: int) -> Work:
    random = torch.Generator().manual_seed(SEED + round_number)
    prompts = torch.randint(3, vocabulary, (PROMPTS, prompt_length), generator=random)
    lengths = torch.empty(PROMPTS * SAMPLES).exponential_(3 / LONGEST, generator=random)
    limits = lengths.long().clamp(1, LONGEST)
    limits[0] = LONGEST  # no round is short for engines that wait for the longest row
    return Work(Ragged.from_rows(list(prompts.repeat_interleave(SAMPLES, dim=0))), limits)


class Limited(TorchRollout):
    """The built-in generator with a token limit per row."""

    rows: torch.Tensor

    def limits(self, prompts: Ragged, sampling: SamplingParams, num_embeddings: int) -> torch.Tensor:
        assert (super().limits(prompts, sampling, num_embeddings) >= self.rows).all()
        return self.rows


class Torch:
    """The built-in generator; `change` updates the weights in place, as an optimizer does."""

    def __init__(self, folder: Path, max_model_len: int):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.weights = [(name, weight.detach()) for name, weight in model.named_parameters()]
        self.rollout = Limited(RolloutEngineConfig(model_path=str(folder), max_model_len=max_model_len))

    def change(self) -> None:
        for _, weight in self.weights:
            weight.mul_(1.0)

    def run(self, work: Work) -> int:
        self.rollout.load_weights(self.weights)
        self.rollout.rows = work.limits
        out = self.rollout.generate_sequences(work.prompts, SamplingParams(LONGEST, ignore_eos=True))
        return len(out.log_probs.values)


class HF:
    def __init__(self, folder: Path, max_model_len: int):
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config = transformers.GenerationConfig()

    def change(self) -> None:
        pass

    def run(self, work: Work) -> int:
        tokens = torch.stack(work.prompts.rows())
        config = transformers.GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=int(work.limits.max()), pad_token_id=0
        )
        with torch.inference_mode():
            self.model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
        return int(work.limits.sum())  # tokens beyond a row's limit are wasted


class VLLM:
    def __init__(self, folder: Path, max_model_len: int):
        settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        for name, value in settings.items():
            os.environ.setdefault(name, value)
        import vllm  # pyright: ignore[reportMissingImports]

        self.vllm = vllm
        self.llm = vllm.LLM(
            model=str(folder), dtype="float32", enforce_eager=True, max_model_len=max_model_len,
            max_num_seqs=PROMPTS * SAMPLES, enable_prefix_caching=True, seed=0, generation_config="vllm",
            logprobs_mode="processed_logprobs",
        )  # fmt: skip

    def change(self) -> None:
        assert self.llm.reset_prefix_cache()

    def run(self, work: Work) -> int:
        common = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False, "flat_logprobs": True}
        sampling = [self.vllm.SamplingParams(max_tokens=limit, **common) for limit in work.limits.tolist()]
        prompts = [{"prompt_token_ids": row.tolist()} for row in work.prompts.rows()]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


ENGINES: dict[str, Callable[[Path, int], Any]] = {"torch": Torch, "hf": HF, "vllm": VLLM}


def measured(engine: Any, work: Work) -> Spent:
    engine.change()
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = engine.run(work)
    spent = Spent(time.perf_counter() - wall, time.process_time() - cpu)
    assert tokens == int(work.limits.sum()), f"{tokens} tokens of {int(work.limits.sum())}"
    return spent


@dataclass(frozen=True)
class Comparison:
    """Time of each engine in each round, mean tokens per round, and the minimum work of a round."""

    spent: dict[str, list[Spent]]
    tokens: float
    work: roofline.Work


def compare(model: str, prompt_length: int, names: list[str], rounds: int) -> Comparison:
    shape = MODELS[model]
    spent: dict[str, list[Spent]] = {name: [] for name in names}
    tokens, least = 0, roofline.NOTHING
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, **asdict(shape))
        engines = {name: ENGINES[name](Path(folder), prompt_length + LONGEST) for name in names}
        # vLLM changes the number of threads when it is imported; restore it for all engines.
        set_threads(int(os.environ["OMP_NUM_THREADS"]))
        for engine in engines.values():
            measured(engine, work_of(-1, prompt_length, shape.vocab_size))
        for number in range(rounds):
            work = work_of(number, prompt_length, shape.vocab_size)
            tokens += int(work.limits.sum())
            lengths = work.prompts.lengths.tolist(), work.limits.tolist()
            least += roofline.generation(shape, roofline.groups_of(*lengths))
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                spent[name].append(measured(engines[name], work))
    return Comparison(spent, tokens / rounds, least / rounds)


set_threads = torch.set_num_threads
"""The original function: vLLM replaces it with one that does nothing."""


def lines_of(model: str, prompt_length: int, comparison: Comparison, rates: roofline.Rates) -> list[str]:
    """Table rows, one per engine."""
    lines = []
    for name, spent in comparison.spent.items():
        wall = statistics.median(one.wall for one in spent)
        cells = [model, str(prompt_length), name, f"{wall:.2f}", f"{statistics.median(s.cpu for s in spent):.2f}"]
        cells.append(f"{comparison.tokens / wall:.0f}")
        cells += [form.format(**roofline.reached(comparison.work, wall, rates)) for form in roofline.COLUMNS.values()]
        for other in ("hf", "vllm"):
            if other not in comparison.spent or other == name:
                cells.append("")
                continue
            pairs = list(zip(comparison.spent[other], spent, strict=True))
            by_wall = statistics.median(first.wall / second.wall for first, second in pairs)
            by_cpu = statistics.median(first.cpu / second.cpu for first, second in pairs)
            best = min(s.wall for s in comparison.spent[other]) / min(s.wall for s in spent)
            cells.append(f"**{by_wall:.2f}** / {by_cpu:.2f} / {best:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", default="torch,hf,vllm", help="vllm is skipped if it is not installed")
    parser.add_argument("--models", default="3M,27M")
    parser.add_argument("--prompts", default="32,264", help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", help="also write the table to this Markdown file")
    options = parser.parse_args()
    has_vllm = importlib.util.find_spec("vllm") is not None
    names = [name for name in options.engines.split(",") if name != "vllm" or has_vllm]
    heads = ["model", "prompt", "engine", "seconds", "CPU seconds", "tokens/s", *roofline.COLUMNS]
    heads += ["hf / engine", "vllm / engine"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    num_threads = int(os.environ["OMP_NUM_THREADS"])
    rates = roofline.measured_rates(num_threads)
    for model in options.models.split(","):
        for length in options.prompts.split(","):
            lines += lines_of(model, int(length), compare(model, int(length), names, options.rounds), rates)
            print("\n".join(lines[-len(names) :]), flush=True)
    text = [
        "# Speed of the built-in generator",
        "",
        (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip(),
        "",
        f"{machine()}; {num_threads} threads, {options.rounds} rounds. Seconds are medians over the rounds; a ratio "
        "has three values: median of wall time / median of CPU time / wall time of the fastest rounds. Above 1, the "
        f"engine of the row is faster. {roofline.sentence([roofline.reached(roofline.NOTHING, 1.0, rates)])}",
        "",
        *lines,
        "",
    ]
    print("\n".join(text))
    if options.out:
        Path(options.out).write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})
    main()
