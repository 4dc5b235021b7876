"""The plain generator: `transformers.generate` as it is, for comparison and for models that others refuse.

    rollout = HFRollout(RolloutEngineConfig(model_path="models/tiny"))
    rollout.load_weights(engine.named_weights())
    rollout.generate_sequences(prompts, SamplingParams(max_tokens=64))

Prompts are padded on the left, finished rows are computed until the last one of their part has ended, and every
row's prompt is computed by itself. Log-probs are read from the scores that transformers sampled from. A batch
runs in parts, since those scores take (tokens x rows x vocabulary) of memory.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams
from camshaft.rollout.borrowed import BorrowedModel
from camshaft.rollout.sampling import combined_seed

SCORE_BYTES = 2**30
"""The scores of one part take at most so much memory, unless one row alone takes more."""


class HFRollout(BaseRollout):
    """See the map above.

    transformers draws all rows from one random state: the same call gives the same result, but a row's samples
    depend on the rows that ride along. The caller's random state is left alone.
    """

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        # "eager" is the family's own code, exact where the fast kernels are not (soft-capped scores).
        self.model = BorrowedModel(config, attention="eager")
        # What the folder recommends for chatting would change the distribution behind our back.
        self.model.hf.generation_config = GenerationConfig()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load(weights)

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        hf = self.model.ready()
        limits = self.limits(prompts, sampling, self.model.num_embeddings)
        seeds = self.seeds_of_call(len(prompts), seeds)
        if not len(prompts):
            return Generation.empty(prompts)
        start = time.perf_counter()
        parts = [
            self._generate(hf, prompts.select(rows), limits[rows], sampling, combined_seed(seeds[rows]))
            for rows in self._parts(prompts.lengths.tolist(), limits.tolist())
        ]
        responses = Ragged.concat([part.responses for part in parts])
        metrics = {name: sum(part.metrics[name] for part in parts) for name in parts[0].metrics}
        metrics |= {
            "response_tokens": float(len(responses.values)),
            "slot_use": (len(responses.values) - len(prompts)) / max(metrics["rows_decoded"], 1),
            "seconds": time.perf_counter() - start,
        }
        log_probs = Ragged.concat([part.log_probs for part in parts])
        finished = torch.cat([part.finished for part in parts])
        return Generation(responses, log_probs, finished, metrics).to(prompts.values.device)

    def sleep(self) -> None:
        self.model.sleep()

    def wake_up(self) -> None:
        self.model.wake_up()

    def _parts(self, lengths: list[int], limits: list[int]) -> Iterator[slice]:
        """Consecutive rows that are padded to one grid, by the limits of the config and of memory."""
        first = longest = most = 0
        vocabulary = self.model.num_embeddings
        for row, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
            longest, most, rows = max(longest, length), max(most, limit), row - first + 1
            if row > first and (
                rows > self.config.max_num_seqs
                or rows * longest > self.config.max_num_batched_tokens
                or rows * most * vocabulary * 4 > SCORE_BYTES
            ):
                yield slice(first, row)
                first, longest, most = row, length, limit
        yield slice(first, len(lengths))

    def _generate(self, hf: Any, prompts: Ragged, limits: Tensor, sampling: SamplingParams, seed: int) -> Generation:
        """One call of `transformers.generate`."""
        stop_ids = [*(() if sampling.ignore_eos else self.model.stop_ids), *sampling.stop_token_ids]
        chances = {} if sampling.greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p}
        config = GenerationConfig(
            do_sample=not sampling.greedy,
            top_k=None if sampling.greedy else max(sampling.top_k, 0),
            **chances,
            max_new_tokens=int(limits.max()),
            eos_token_id=stop_ids or None,
            pad_token_id=0,  # written behind a row's end, and cut off below
            output_scores=True,
            return_dict_in_generate=True,
        )
        grid = prompts.to(self.model.device)
        with torch.no_grad(), _seeded(seed, self.model.device):
            out = hf.generate(grid.padded("left"), attention_mask=grid.mask("left").long(), generation_config=config)
        width = int(prompts.lengths.max())
        tokens = out.sequences[:, width:]
        chosen = [
            scores.log_softmax(-1).gather(-1, step[:, None])[:, 0]
            for scores, step in zip(out.scores, tokens.unbind(1), strict=True)
        ]
        log_probs = torch.stack(chosen, dim=1).float()
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        inside = columns < limits.to(tokens.device)[:, None]
        stops = torch.isin(tokens, torch.tensor(stop_ids, dtype=torch.int64, device=tokens.device)) & inside
        ended = stops.cumsum(dim=1) - stops.long() > 0  # a stop token is kept, what follows it is not
        keep = inside & ~ended
        steps = tokens.shape[1] - 1
        metrics = {
            "prompt_tokens_computed": float(tokens.shape[0] * width),
            "decode_steps": float(steps),
            "rows_decoded": float(steps * len(prompts)),
        }
        kept = Ragged.from_padded(log_probs, keep)
        if not bool(kept.values.isfinite().all()):
            raise RolloutError("the model's logits are not finite; look at the weights")
        return Generation(Ragged.from_padded(tokens, keep), kept, stops.any(dim=1), metrics)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The random state of `seed` on the CPU and on `device`; what it was before, afterwards."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    module = torch.get_device_module(device)
    with torch.random.fork_rng(devices=[device], device_type=device.type), module.device(device):
        torch.default_generator.manual_seed(seed)
        module.manual_seed(seed)
        yield
