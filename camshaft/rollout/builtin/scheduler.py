"""Continuous batching: rows start when cache slots are free and leave when they end.

    generation = Scheduler(decoder, cache, request, config).generate()

Live rows are dense, in slots 0..B-1: when rows end, the last rows move into their slots, so each decode step computes
live rows only. Waiting rows start when an eighth of the slots is free. Each distinct prompt is computed once for all of
its rows; a spare slot keeps its keys and values for rows without a slot. Used by `rollout.py`.
"""

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, SamplingParams
from camshaft.rollout.builtin.cpu.traced_decoder import Decoder, Forward
from camshaft.rollout.builtin.cuda.graphs import CUDAGraphDecoder
from camshaft.rollout.builtin.kv_cache import DecodeStep, KVCache, PrefillStep
from camshaft.rollout.sampling import draw, restrict, sample_greedy, uniform_numbers
from camshaft.rollout.stop_strings import StopStrings

REFILL = 8
"""Prefill when one slot in this many is free: computing several prompts at once is faster."""

AHEAD = 32
"""Number of steps for which uniform random numbers are drawn at once."""

TOKEN, POSITION, END, SEED, ROW = range(5)
"""Rows of `Scheduler.live`: last token, its position, the last allowed position, the seed, the row of the batch."""


@dataclass(frozen=True)
class GenerationRequest:
    """Validated arguments of one call of `generate_sequences`."""

    prompts: Ragged
    limits: Tensor
    """(B,) maximum number of tokens per row."""
    seeds: Tensor
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    stop_strings: StopStrings | None = None


@dataclass
class _Group:
    """Waiting rows with equal prompts."""

    prompt: list[int]
    rows: list[int]
    logits: Tensor | None = None
    """Logits of the first response token, while the spare slot keeps the prompt's keys and values."""


class Scheduler:
    """State of one request: waiting rows, live rows and sampled tokens."""

    def __init__(
        self,
        decoder: Decoder | CUDAGraphDecoder,
        cache: KVCache,
        request: GenerationRequest,
        config: RolloutEngineConfig,
    ):
        self.hf, self.decoder, self.cache, self.sampling = decoder.hf, decoder, cache, request.sampling
        prompts = request.prompts
        self.forward: Forward = decoder.eager
        self.device = torch.device(config.device)
        self.max_tokens = config.max_num_batched_tokens
        self.num_slots = min(config.max_num_seqs, len(prompts))
        self.groups = deque(_groups(prompts))
        self.num_waiting = len(prompts)
        self.lengths = prompts.lengths.to(self.device)
        self.ends = self.lengths + request.limits.to(self.device) - 1
        self.num_steps = int(request.limits.max())
        self.seeds = request.seeds.to(self.device)
        self.stop_ids = torch.tensor(request.stop_ids, dtype=torch.int64, device=self.device)
        self.stop_strings = request.stop_strings
        self.responses: list[list[int]] = [[] for _ in range(len(prompts))] if request.stop_strings else []
        self.live = torch.empty(5, 0, dtype=torch.int64, device=self.device)
        self.ahead = torch.empty(0, 0, dtype=torch.float64, device=self.device)  # uniforms, (future steps, live rows)
        self.token_step: DecodeStep | None = None  # the last decode step, if the live rows are unchanged
        self.longest = 0  # the highest position of a live row, equal to its number of cached positions
        self.left = 0  # steps until the first live row reaches its limit
        self.finished = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        self.out: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, tokens, log-probs, one entry per step
        self.prompt_tokens = self.steps = self.row_steps = 0

    def generate(self) -> Generation:
        """Generate all rows to their ends."""
        start = time.perf_counter()
        # Inference tensors must not leave this context: results are copied to normal tensors below.
        with torch.inference_mode(), self.decoder.prepare(self.num_slots, self.num_steps) as self.forward:
            while self.num_waiting or self.live.shape[1]:
                free = self.num_slots - self.live.shape[1]
                if self.num_waiting and free >= min(self.num_waiting, max(1, self.num_slots // REFILL)):
                    self._fill_slots()
                else:
                    self._decode()
        rows, tokens, log_probs = (torch.cat(parts) for parts in zip(*self.out, strict=True))
        order = rows.argsort(stable=True)  # keeps the order of tokens within a row
        lengths = rows.bincount(minlength=len(self.finished)).cpu()
        metrics = {
            "prompt_tokens_computed": float(self.prompt_tokens),
            "response_tokens": float(len(tokens)),
            "decode_steps": float(self.steps),
            "rows_decoded": float(self.row_steps),
            "slot_use": self.row_steps / max(self.steps * self.num_slots, 1),
            "seconds": time.perf_counter() - start,
        }
        responses = Ragged(tokens[order], lengths)
        return Generation(responses, responses.like(log_probs[order]), self.finished.clone(), metrics)

    def _fill_slots(self) -> None:
        """Start rows until no slot is free or no row waits."""
        while self.num_waiting and self.live.shape[1] < self.num_slots:
            if self.groups[0].logits is None:
                self._prefill()
            else:
                self._start_cached()

    def _prefill(self) -> None:
        """Compute as many waiting prompts as fit in one model call, and start their rows."""
        taken = self._take_prompts()
        first = self.live.shape[1]
        sources = [i for i, (_, rows) in enumerate(taken) for _ in rows]
        rows = [row for _, rows in taken for row in rows]
        targets = list(range(first, first + len(rows)))
        last, last_rows = taken[-1]
        if len(last_rows) < len(last.rows):
            sources, targets = [*sources, len(taken) - 1], [*targets, self.num_slots]
        lengths = [len(group.prompt) for group, _ in taken]
        self.cache.reserve(self.num_slots + 1, max(lengths), first)
        step = PrefillStep(self.cache, lengths, sources, targets, self.device)
        tokens = torch.tensor([token for group, _ in taken for token in group.prompt], device=self.device)
        ends = (torch.tensor(lengths).cumsum(0) - 1).to(self.device)
        logits = self.hf(input_ids=tokens[None], **step.kwargs, slots=step, logits_to_keep=ends).logits[0]
        self.cache.check_layers()
        if len(logits) != len(taken):
            logits = logits[ends]  # the model ignores `logits_to_keep`
        self.prompt_tokens += len(tokens)
        if len(last_rows) < len(last.rows):
            self.groups.appendleft(_Group(last.prompt, last.rows[len(last_rows) :], logits[-1:]))
        self._start(rows, logits[torch.tensor(sources[: len(rows)], device=self.device)])

    def _take_prompts(self) -> list[tuple[_Group, list[int]]]:
        """Return the next prompts, each with the rows that get a slot."""
        free = self.num_slots - self.live.shape[1]
        taken: list[tuple[_Group, list[int]]] = []
        tokens = 0
        while self.groups and free and (not taken or tokens + len(self.groups[0].prompt) <= self.max_tokens):
            group = self.groups.popleft()
            rows = group.rows[:free]
            taken.append((group, rows))
            tokens += len(group.prompt)
            free -= len(rows)
        return taken

    def _start_cached(self) -> None:
        """Start rows whose prompt is cached in the spare slot."""
        group = self.groups.popleft()
        assert group.logits is not None
        first = self.live.shape[1]
        rows, rest = group.rows[: self.num_slots - first], group.rows[self.num_slots - first :]
        targets = torch.arange(first, first + len(rows), device=self.device)
        self.cache.copy(torch.full_like(targets, self.num_slots), targets, len(group.prompt))
        if rest:
            self.groups.appendleft(_Group(group.prompt, rest, group.logits))
        self._start(rows, group.logits.expand(len(rows), -1))

    def _start(self, rows: list[int], logits: Tensor) -> None:
        """Sample the first token of rows whose prompts are in the slots after the live ones."""
        index = torch.tensor(rows, device=self.device)
        positions, seeds = self.lengths[index], self.seeds[index]
        tokens = self._choose(logits, index, uniform_numbers(seeds, positions))
        self.live = torch.cat([self.live, torch.stack([tokens, positions, self.ends[index], seeds, index])], dim=1)
        self.ahead = self.ahead.new_empty(0, self.live.shape[1])
        self._live_rows_changed()
        self.num_waiting -= len(rows)
        self._remove_ended()

    def _decode(self) -> None:
        """Generate one token for each live row."""
        tokens, positions, _, seeds, rows = self.live
        self.cache.reserve(self.num_slots + 1, self.longest + 1, len(rows))
        if self.token_step is None or not self.token_step.advance(self.longest + 1):
            self.token_step = DecodeStep(self.cache, positions, self.longest + 1)
        logits = self.forward(tokens, positions, self.token_step)
        positions += 1
        self.longest += 1
        self.left -= 1
        if not len(self.ahead):
            self.ahead = uniform_numbers(seeds, positions + torch.arange(AHEAD, device=self.device)[:, None])
        tokens.copy_(self._choose(logits, rows, self.ahead[0]))
        self.ahead = self.ahead[1:]
        self.steps += 1
        self.row_steps += len(rows)
        self._remove_ended()

    def _choose(self, logits: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
        """Sample the next token of each row and add it to the result."""
        if self.sampling.greedy:
            tokens, log_probs = sample_greedy(logits)
        else:
            scores = restrict(logits, self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)
            tokens, log_probs = draw(scores, uniforms)
        self.out.append((rows, tokens, log_probs))
        if self.stop_strings is not None:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                self.responses[row].append(token)
        return tokens

    def _remove_ended(self) -> None:
        """Remove ended rows and move the last rows into their slots."""
        stopped = self._stopped()
        if self.left > 0 and (
            stopped is None or not bool(stopped.any())
        ):  # synchronizes with the device, once per step
            return
        done = self.live[POSITION] >= self.live[END]
        if stopped is not None:
            done |= stopped
            self.finished[self.live[ROW]] = stopped
        remaining = (~done).nonzero()[:, 0]
        order = torch.arange(len(remaining), device=self.device)
        moved = remaining[remaining >= len(remaining)]
        if len(moved):
            holes = done[: len(remaining)].nonzero()[:, 0]
            self.cache.copy(moved, holes, self.longest)
            order[holes] = moved
        self.live, self.ahead = self.live.index_select(1, order), self.ahead.index_select(1, order)
        self._live_rows_changed()

    def _stopped(self) -> Tensor | None:
        """Return (live rows,) bool: the last token is a stop; None if nothing stops a row."""
        stopped = (self.live[TOKEN][:, None] == self.stop_ids).any(dim=1) if len(self.stop_ids) else None
        if self.stop_strings is None:
            return stopped
        responses = [self.responses[row] for row in self.live[ROW].tolist()]
        by_text = torch.tensor([self.stop_strings.is_ended_by(tokens) for tokens in responses], device=self.device)
        return by_text if stopped is None else stopped | by_text

    def _live_rows_changed(self) -> None:
        """Update the numbers that depend on the set of live rows."""
        self.token_step = None
        positions, ends = self.live[POSITION], self.live[END]
        any_live = len(positions) > 0
        self.longest, self.left = (int(positions.max()), int((ends - positions).min())) if any_live else (0, 0)


def _groups(prompts: Ragged) -> list[_Group]:
    """Group rows with equal prompts, in the order of first appearance."""
    groups: dict[bytes, _Group] = {}
    for row, tokens in enumerate(prompts.to("cpu").rows()):
        key = tokens.numpy().tobytes()
        if key not in groups:
            groups[key] = _Group(tokens.tolist(), [])
        groups[key].rows.append(row)
    return list(groups.values())
