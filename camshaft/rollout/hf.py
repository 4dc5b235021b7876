"""Generation with unmodified `transformers.generate`, for comparison and for models that `torch` does not support.

    rollout = HFRollout(RolloutEngineConfig(model_path="models/tiny"))
    rollout.load_weights(engine.named_weights())
    rollout.generate_sequences(prompts, SamplingParams(max_tokens=64))

A call is split into batches of rows. Prompts are padded on the left, repeated prompts are computed for each row, and
finished rows are computed until the last row of their batch ends. Models whose results depend on padding, for example
by a recurrent state, get batches of rows of equal length. The logits warpers of transformers restrict the distribution.
`sampling.py` samples from it, so a row's samples depend only on its seed and prompt.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from camshaft.config.backends import HF
from camshaft.config.families.support import OWN_ATTENTION
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.padded_rows import runs_padded
from camshaft.progress import counted
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, OpenRows, SamplingParams, check_finite
from camshaft.rollout.sampling import draw, sample_greedy, uniform_numbers
from camshaft.rollout.shared_model import SharedModel, SharedModelRollout
from camshaft.rollout.stop_strings import StopStrings, has_stop

RECOMPUTED = ("rwkv",)
"""Model types that `transformers.generate` decodes wrongly from their state; each token recomputes the row."""


class HFRollout(SharedModelRollout):
    """Rollout with `transformers.generate`. A row's samples depend on its seed and prompt, not on other rows."""

    capabilities = HF

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        if config.dtype == "float64":
            raise RolloutError(
                "rollout.name=hf does not support dtype=float64, because transformers computes softmax in float32, "
                "where a float64 mask is infinite; set rollout.dtype=float32"
            )
        # "eager" runs the attention code of the model itself. Fast kernels are not exact for soft-capped scores.
        self.model = SharedModel(config, attention="eager")
        # The sampling settings recommended in the model folder would change the distribution.
        self.model.hf.generation_config = GenerationConfig()
        model_type = self.model.hf.config.get_text_config().model_type
        self.pads = model_type in OWN_ATTENTION or not runs_padded(self.model.hf.config)
        """True if the results of the model do not depend on padding on the left."""

    def generate_sequences(
        self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None, generated: Ragged | None = None
    ) -> Generation:
        hf = self.model.require_model()
        stop_ids = [*(() if sampling.ignore_eos else self.model.stop_ids), *sampling.stop_token_ids]
        strings = StopStrings(self.model.tokenizer, sampling.stop) if sampling.stop else None
        ends = partial(has_stop, stop_ids=stop_ids, stops=strings)
        rows = self.open_rows(prompts, sampling, seeds, generated, self.model.num_embeddings, ends)
        if not len(rows.prompts):
            return rows.complete(Generation.empty(prompts))
        start = time.perf_counter()
        lengths = rows.contexts.lengths.tolist()
        plan, batches = list(self.plan_batches(lengths, self.config.max_num_batched_tokens)), list[Generation]()
        with counted(len(rows.prompts), "responses") as work:
            for batch in plan:
                batches.append(self._generate(hf, rows.select(torch.tensor(batch)), sampling, stop_ids, strings))
                work.done += len(batch)
        order = torch.tensor([row for batch in plan for row in batch]).argsort()
        responses = Ragged.concat([batch.responses for batch in batches]).select(order)
        metrics = {name: sum(batch.metrics[name] for batch in batches) for name in batches[0].metrics}
        metrics |= {
            "response_tokens": float(len(responses.values)),
            "slot_use": (len(responses.values) - len(responses)) / max(metrics["rows_decoded"], 1),
            "seconds": time.perf_counter() - start,
        }
        log_probs = Ragged.concat([batch.log_probs for batch in batches]).select(order)
        check_finite(log_probs)
        finished = torch.cat([batch.finished for batch in batches])[order.to(responses.values.device)]
        return rows.complete(Generation(responses, log_probs, finished, metrics).to(prompts.values.device))

    def plan_batches(self, lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
        """Yield the rows of each batch, within the limits of the config: consecutive rows, or rows of equal length."""
        batch, width = list[int](), 0
        for row in range(len(lengths)) if self.pads else sorted(range(len(lengths)), key=lengths.__getitem__):
            num_tokens = (len(batch) + 1) * max(width, lengths[row])
            is_full = len(batch) == self.config.max_num_seqs or num_tokens > max_tokens
            if batch and (is_full or not (self.pads or lengths[row] == width)):
                yield batch
                batch, width = [], 0
            batch.append(row)
            width = max(width, lengths[row])
        yield batch

    def compute_logits(self, hf: PreTrainedModel, rows: Ragged) -> Tensor:
        """Compute rows that are padded on the right, where causal attention hides the padding."""
        mask = rows.mask()
        return hf(input_ids=rows.padded(), attention_mask=mask.long(), use_cache=False).logits[mask]

    def _generate(
        self, hf: Any, rows: OpenRows, sampling: SamplingParams, stop_ids: list[int], strings: StopStrings | None
    ) -> Generation:
        """Generate one batch with a single call of `transformers.generate`."""
        config = GenerationConfig(
            do_sample=False,  # `_Sampler` leaves one token per row
            max_new_tokens=int(rows.limits.max()),
            eos_token_id=stop_ids or None,
            use_cache=hf.config.model_type not in RECOMPUTED,
            pad_token_id=0,  # written after the end of a row and removed below
            return_dict_in_generate=True,
        )
        contexts, width = rows.contexts.to(self.model.device), int(rows.contexts.lengths.max())
        sampler = _Sampler(sampling, rows, self.model.device)
        criteria = None if strings is None else _StopCriteria(strings, rows.generated, width)
        with torch.no_grad():
            out = hf.generate(
                contexts.padded("left"),
                attention_mask=contexts.mask("left").long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([] if criteria is None else [criteria]),
            )
        tokens = out.sequences[:, width:]
        log_probs = torch.stack(sampler.log_probs, dim=1)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        is_within_limit = columns < rows.limits.to(tokens.device)[:, None]
        is_stop = torch.isin(tokens, torch.tensor(stop_ids, dtype=torch.int64, device=tokens.device))
        if criteria is not None:
            is_stop |= columns == torch.tensor(criteria.ends, device=tokens.device)[:, None]
        is_stop &= is_within_limit
        is_after_stop = is_stop.cumsum(dim=1) - is_stop.long() > 0  # the stop token itself is kept
        mask = is_within_limit & ~is_after_stop
        steps = tokens.shape[1] - 1
        metrics = {
            "prompt_tokens_computed": float(tokens.shape[0] * width),
            "decode_steps": float(steps),
            "rows_decoded": float(steps * len(contexts)),
        }
        responses, row_log_probs = Ragged.from_padded(tokens, mask), Ragged.from_padded(log_probs, mask)
        return Generation(responses, row_log_probs, is_stop.any(dim=1), metrics)


class _Sampler(LogitsProcessor):
    """Logits processor that applies the penalties and the warpers, and samples the next token of each row.

    The penalties of transformers would also apply to padding tokens.
    """

    def __init__(self, sampling: SamplingParams, rows: OpenRows, device: torch.device):
        self._greedy, self._seeds = sampling.greedy, rows.seeds.to(device)
        self._lengths, self._rows = rows.contexts.lengths.to(device), torch.arange(len(rows.seeds), device=device)
        self._penalties = sampling.penalties(rows, device)
        self._warpers = LogitsProcessorList()
        if sampling.temperature != 1 and not sampling.greedy:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.min_p > 0:
            self._warpers.append(MinPLogitsWarper(float(sampling.min_p)))
        if sampling.top_k > 0:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self._penalties is not None:
            scores = self._penalties.apply(scores, self._rows)
        if self._greedy:
            tokens, log_probs = sample_greedy(scores)
        else:
            positions = self._lengths + len(self.log_probs)
            tokens, log_probs = draw(self._warpers(input_ids, scores), uniform_numbers(self._seeds, positions))
        self.log_probs.append(log_probs)
        if self._penalties is not None:
            self._penalties.add(self._rows, tokens)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


class _StopCriteria(StoppingCriteria):
    """Stopping criterion that ends rows at stop strings and records the column of each row's last token."""

    def __init__(self, stop_strings: StopStrings, generated: Ragged, width: int):
        self._stop_strings, self._width = stop_strings, width
        self._generated = [tokens.tolist() for tokens in generated.rows()]
        self.ends: list[int] = []
        """Column of the last token of each row, or -1 if no stop string has ended the row."""

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        rows = input_ids[:, self._width :].tolist()
        self.ends = self.ends or [-1] * len(rows)
        for number, row in enumerate(rows):
            if self.ends[number] < 0 and self._stop_strings.is_ended_by(self._generated[number] + row):
                self.ends[number] = len(row) - 1
        return torch.tensor([end >= 0 for end in self.ends], device=input_ids.device)
