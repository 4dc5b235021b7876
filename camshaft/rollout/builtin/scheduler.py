"""Continuous batching: rows join when a slot is free and leave when they end.

    generation = ContinuousBatch(decoder, pool, request, config).generate()

Live rows are dense, in slots 0..B-1: when rows end, the last ones move into the holes, so that every step
computes on live rows only. Waiting rows join when an eighth of the slots is free. Each distinct prompt is
computed once, whatever the number of its rows: if they do not all find a slot, a spare slot keeps what was
computed. Used by `torch_rollout.py`.
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
from camshaft.rollout.builtin.cuda.graphs import RecordedSteps
from camshaft.rollout.builtin.kv_cache import KVCache, PromptStep, TokenStep
from camshaft.rollout.sampling import draw, greedy, restrict, uniform
from camshaft.rollout.stop_strings import StopStrings

REFILL = 8
"""Waiting rows join when one slot in so many is free: computing their prompts in one go pays."""

AHEAD = 32
"""Random numbers of live rows are made for so many steps at once."""

TOKEN, POSITION, END, SEED, ROW = range(5)
"""What is known of a live row: its last token and where that stands in the row, where its last token may stand
at most, its seed, and its number in the batch."""


@dataclass(frozen=True)
class Request:
    """One call of `generate_sequences`, checked."""

    prompts: Ragged
    limits: Tensor
    """(B,) how many tokens each row may get."""
    seeds: Tensor
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    stop_strings: StopStrings | None = None


@dataclass
class _Group:
    """Waiting rows with one and the same prompt."""

    prompt: list[int]
    rows: list[int]
    logits: Tensor | None = None
    """What follows the prompt; known while its keys and values are kept in the spare slot."""


class ContinuousBatch:
    """The state of one request: rows that wait, rows that live in slots, tokens that were chosen."""

    def __init__(self, decoder: Decoder | RecordedSteps, pool: KVCache, request: Request, config: RolloutEngineConfig):
        self.hf, self.decoder, self.pool, self.sampling = decoder.hf, decoder, pool, request.sampling
        prompts = request.prompts
        self.forward: Forward = decoder.own
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
        self.ahead = torch.empty(0, 0, dtype=torch.float64, device=self.device)  # uniforms, (steps to come, live rows)
        self.token_step: TokenStep | None = None  # that of the last tokens, if the live rows are still those
        self.longest = 0  # the highest position of a live row, which is how many of its places are filled
        self.left = 0  # steps until one of them is as long as it may get
        self.finished = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        self.out: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, tokens, log-probs, one entry per step
        self.prompt_tokens = self.steps = self.row_steps = 0

    def generate(self) -> Generation:
        """All rows to their ends."""
        start = time.perf_counter()
        # No view of weights leaves this context, and what leaves it is copied to normal tensors below.
        with torch.inference_mode(), self.decoder.ready(self.num_slots, self.num_steps) as self.forward:
            while self.num_waiting or self.live.shape[1]:
                free = self.num_slots - self.live.shape[1]
                if self.num_waiting and free >= min(self.num_waiting, max(1, self.num_slots // REFILL)):
                    self._fill_slots()
                else:
                    self._step()
        rows, tokens, log_probs = (torch.cat(parts) for parts in zip(*self.out, strict=True))
        order = rows.argsort(stable=True)  # within a row, tokens are in the order in which they were chosen
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
        """Let rows join until no slot is free or no row waits."""
        while self.num_waiting and self.live.shape[1] < self.num_slots:
            if self.groups[0].logits is None:
                self._compute_prompts()
            else:
                self._join_kept()

    def _compute_prompts(self) -> None:
        """One model call on as many waiting prompts as fit; their rows join."""
        taken = self._take_prompts()
        first = self.live.shape[1]
        sources = [i for i, (_, rows) in enumerate(taken) for _ in rows]
        rows = [row for _, rows in taken for row in rows]
        targets = list(range(first, first + len(rows)))
        last, last_rows = taken[-1]
        if len(last_rows) < len(last.rows):
            sources, targets = [*sources, len(taken) - 1], [*targets, self.num_slots]
        lengths = [len(group.prompt) for group, _ in taken]
        self.pool.reserve(self.num_slots + 1, max(lengths), first)
        step = PromptStep(self.pool, lengths, sources, targets, self.device)
        tokens = torch.tensor([token for group, _ in taken for token in group.prompt], device=self.device)
        ends = (torch.tensor(lengths).cumsum(0) - 1).to(self.device)
        logits = self.hf(input_ids=tokens[None], **step.kwargs, slots=step, logits_to_keep=ends).logits[0]
        self.pool.check_layers()
        if len(logits) != len(taken):
            logits = logits[ends]  # a model that does not know `logits_to_keep`
        self.prompt_tokens += len(tokens)
        if len(last_rows) < len(last.rows):
            self.groups.appendleft(_Group(last.prompt, last.rows[len(last_rows) :], logits[-1:]))
        self._join(rows, logits[torch.tensor(sources[: len(rows)], device=self.device)])

    def _take_prompts(self) -> list[tuple[_Group, list[int]]]:
        """The next prompts with those of their rows for which there is a slot."""
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

    def _join_kept(self) -> None:
        """Rows join whose prompt is kept in the spare slot."""
        group = self.groups.popleft()
        assert group.logits is not None
        first = self.live.shape[1]
        rows, rest = group.rows[: self.num_slots - first], group.rows[self.num_slots - first :]
        targets = torch.arange(first, first + len(rows), device=self.device)
        self.pool.copy(torch.full_like(targets, self.num_slots), targets, len(group.prompt))
        if rest:
            self.groups.appendleft(_Group(group.prompt, rest, group.logits))
        self._join(rows, group.logits.expand(len(rows), -1))

    def _join(self, rows: list[int], logits: Tensor) -> None:
        """Choose the first token of rows whose prompts are in the slots behind the live ones."""
        index = torch.tensor(rows, device=self.device)
        positions, seeds = self.lengths[index], self.seeds[index]
        tokens = self._choose(logits, index, uniform(seeds, positions))
        self.live = torch.cat([self.live, torch.stack([tokens, positions, self.ends[index], seeds, index])], dim=1)
        self.ahead = self.ahead.new_empty(0, self.live.shape[1])
        self._changed()
        self.num_waiting -= len(rows)
        self._let_go()

    def _step(self) -> None:
        """One token more for every live row."""
        tokens, positions, _, seeds, rows = self.live
        self.pool.reserve(self.num_slots + 1, self.longest + 1, len(rows))
        if self.token_step is None or not self.token_step.went_on(self.longest + 1):
            self.token_step = TokenStep(self.pool, positions, self.longest + 1)
        logits = self.forward(tokens, positions, self.token_step)
        positions += 1
        self.longest += 1
        self.left -= 1
        if not len(self.ahead):
            self.ahead = uniform(seeds, positions + torch.arange(AHEAD, device=self.device)[:, None])
        tokens.copy_(self._choose(logits, rows, self.ahead[0]))
        self.ahead = self.ahead[1:]
        self.steps += 1
        self.row_steps += len(rows)
        self._let_go()

    def _choose(self, logits: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
        """The next tokens of these rows; noted for the result."""
        if self.sampling.greedy:
            tokens, log_probs = greedy(logits)
        else:
            scores = restrict(logits, self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)
            tokens, log_probs = draw(scores, uniforms)
        self.out.append((rows, tokens, log_probs))
        if self.stop_strings is not None:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                self.responses[row].append(token)
        return tokens

    def _let_go(self) -> None:
        """Rows that have ended leave, and the last rows move into their slots."""
        stopped = self._stopped()
        if self.left > 0 and (stopped is None or not bool(stopped.any())):  # waits for the device, once a step
            return
        done = self.live[POSITION] >= self.live[END]
        if stopped is not None:
            done |= stopped
            self.finished[self.live[ROW]] = stopped
        stay = (~done).nonzero()[:, 0]
        order = torch.arange(len(stay), device=self.device)
        moved = stay[stay >= len(stay)]
        if len(moved):
            holes = done[: len(stay)].nonzero()[:, 0]
            self.pool.copy(moved, holes, self.longest)
            order[holes] = moved
        self.live, self.ahead = self.live.index_select(1, order), self.ahead.index_select(1, order)
        self._changed()

    def _stopped(self) -> Tensor | None:
        """(live rows,) whether the last token ends the row by itself; None where no token does."""
        stopped = (self.live[TOKEN][:, None] == self.stop_ids).any(dim=1) if len(self.stop_ids) else None
        if self.stop_strings is None:
            return stopped
        responses = [self.responses[row] for row in self.live[ROW].tolist()]
        by_text = torch.tensor([self.stop_strings.ended_by(tokens) for tokens in responses], device=self.device)
        return by_text if stopped is None else stopped | by_text

    def _changed(self) -> None:
        """What is known of the live rows as a whole, after some came or went."""
        self.token_step = None
        places, ends = self.live[POSITION], self.live[END]
        some = len(places) > 0
        self.longest, self.left = (int(places.max()), int((ends - places).min())) if some else (0, 0)


def _groups(prompts: Ragged) -> list[_Group]:
    """Rows with equal prompts together, in the order in which the prompts first appear."""
    found: dict[bytes, _Group] = {}
    for row, tokens in enumerate(prompts.to("cpu").rows()):
        key = tokens.numpy().tobytes()
        if key not in found:
            found[key] = _Group(tokens.tolist(), [])
        found[key].rows.append(row)
    return list(found.values())
