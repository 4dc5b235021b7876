"""Continuous batching: a row starts when a cache slot is free and releases its slot when it ends.

    scheduler = Scheduler(decoder, cache, options, config)
    scheduler.add(rows)
    generation = scheduler.generate()       # or `step`, between which rows are added and removed

The B live rows always occupy slots 0..B-1. When rows end, the last rows move into their slots, so a decode step
computes only live rows. On a CPU, rows of similar lengths are in adjacent slots (`length_classes.py`). Waiting rows
start when an eighth of the slots is free. Each distinct prompt is computed once for all of its rows. If some of these
rows do not get a slot yet, a spare slot keeps the prompt's keys and values for them. In this module, the prompt of a
continued row includes its earlier tokens. Rows with an id are kept when they end, and only the new tokens of a kept row
are computed (`kept_rows.py`). `rollout.py` and `stream.py` use this module.
"""

import time
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import supports_triton
from camshaft.progress import counted
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, OpenRows, SamplingParams
from camshaft.rollout.builtin.cpu.traced_decoder import Decoder
from camshaft.rollout.builtin.cuda.graphs import CUDAGraphDecoder
from camshaft.rollout.builtin.decode_trace import Forward
from camshaft.rollout.builtin.extend import ExtendStep
from camshaft.rollout.builtin.kept_rows import KeptRows, Resumed
from camshaft.rollout.builtin.kv_cache import KVCache
from camshaft.rollout.builtin.length_classes import SHORTEST, arrange
from camshaft.rollout.builtin.routed_experts import RoutingRecorder
from camshaft.rollout.builtin.steps import DecodeStep, LengthClass, PrefillStep
from camshaft.rollout.sampling import Penalties, draw, restrict, sample_greedy, uniform_numbers
from camshaft.rollout.stop_strings import StopStrings

REFILL = 8
"""Prefill starts when 1 / REFILL of the slots is free, because computing several prompts at once is faster."""

UNIFORM_STEPS = 32
"""Number of decode steps whose uniform random numbers are computed at once."""

TOKEN, POSITION, END, SEED, ROW = range(5)
"""Indices into `Scheduler.live`: last token, its position, last allowed position, seed, and row of the batch."""


@dataclass(frozen=True)
class GenerationOptions:
    """Options of all rows of a scheduler."""

    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    num_slots: int
    """Maximum number of live rows."""
    stop_strings: StopStrings | None = None
    has_ids: bool = False
    """True if the rows have ids, with which later turns continue them."""


@dataclass
class _PrefixGroup:
    """A prefix group: waiting rows with equal prompts."""

    prompt: list[int]
    rows: list[int]
    logits: Tensor | None = None
    """Logits of the first response token if the prompt is cached in the spare slot, else None."""


class Scheduler:
    """Holds waiting rows, live rows and sampled tokens. Rows have numbers in the order in which they are added."""

    def __init__(
        self,
        decoder: Decoder | CUDAGraphDecoder,
        cache: KVCache,
        options: GenerationOptions,
        config: RolloutEngineConfig,
        recorder: RoutingRecorder | None = None,
        kept: KeptRows | None = None,
    ):
        """`kept` contains the rows of earlier calls, if rows have ids."""
        self.recorder, self.kept = recorder, kept
        self.hf, self.decoder, self.cache, self.sampling = decoder.hf, decoder, cache, options.sampling
        self.forward: Forward = decoder.eager
        self.device = torch.device(config.device)
        self.max_tokens, self.max_slots = config.max_num_batched_tokens, options.num_slots
        self.has_ids = options.has_ids
        self.num_slots = 0 if self.device.type == "cpu" else self.max_slots
        """Number of slots for live rows. On a CPU, it grows with the number of rows."""
        self.stop_ids = torch.tensor(options.stop_ids, dtype=torch.int64, device=self.device)
        self.stop_strings = options.stop_strings
        self.row_ids: list[Hashable] = []
        """Ids of the rows, if they are kept."""
        self.num_cached: list[int] = []
        """Number of tokens of each row that were kept."""
        self.resumed: deque[tuple[int, list[int], Resumed]] = deque()
        """Rows to be resumed, each with its new tokens."""
        self.groups: deque[_PrefixGroup] = deque()
        self.num_waiting = 0
        self.lengths, self.ends, self.seeds = torch.empty(3, 0, dtype=torch.int64, device=self.device)
        """Of each row: length of the prompt, last allowed position, and seed."""
        self.finished = torch.empty(0, dtype=torch.bool, device=self.device)
        self.penalties: Penalties | None = None
        self.responses: list[list[int]] = []
        """Response of each row, if there are stop strings."""
        self.live = torch.empty(5, 0, dtype=torch.int64, device=self.device)  # see TOKEN, ..., ROW; one column per row
        self.uniforms = torch.empty(0, 0, dtype=torch.float64, device=self.device)  # (future steps, live rows)
        self.decode_step: DecodeStep | None = None  # the last decode step, or None if the live rows have changed
        self.classes: list[LengthClass] = []
        """Length classes of the last decode step."""
        self.max_position = 0  # highest position of a live row, which equals its number of cached positions
        self.steps_to_limit = 0  # number of steps until the first live row reaches its limit
        self.samples: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, tokens and log-probs of each step
        self.prompt_tokens = self.steps = self.row_steps = 0

    @property
    def num_rows(self) -> int:
        """Number of rows that have not ended."""
        return self.num_waiting + self.live.shape[1]

    def add(self, rows: OpenRows, row_ids: Sequence[Hashable] | None = None) -> int:
        """Add rows that wait, and return the number of the first one.

        Rows with ids are kept when they end. All rows of a scheduler have ids, or none has.
        """
        first, contexts = len(self.finished), rows.contexts.to("cpu").rows()
        self.row_ids += row_ids or ()
        self.num_cached += [0] * len(contexts)
        resumed = self._take_kept(row_ids, contexts, first) if row_ids else set[int]()
        self.groups += _group_equal_prompts(contexts, resumed, first)
        self.num_waiting += len(contexts)
        self._add_slots()
        lengths = rows.contexts.lengths.to(self.device)
        self.lengths = torch.cat([self.lengths, lengths])
        self.ends = torch.cat([self.ends, lengths + rows.limits.to(self.device) - 1])
        self.seeds = torch.cat([self.seeds, rows.seeds.to(self.device)])
        self.finished = torch.cat([self.finished, torch.zeros_like(lengths, dtype=torch.bool)])
        penalties = self.sampling.penalties(rows, self.device)
        if self.penalties is not None and penalties is not None:
            self.penalties.extend(penalties)
        else:
            self.penalties = penalties
        if self.stop_strings is not None:
            self.responses += [tokens.tolist() for tokens in rows.generated.rows()]
        return first

    def _take_kept(self, row_ids: Sequence[Hashable], contexts: Sequence[Tensor], first: int) -> set[int]:
        """Let kept rows wait to be resumed, and return which of the contexts begin with them."""
        resumed: set[int] = set()
        for i, row_id in enumerate(row_ids):
            kept = None if self.kept is None else self.kept.take(row_id, contexts[i])
            if kept is not None:
                self.num_cached[first + i] = kept.length
                self.resumed.append((first + i, contexts[i][kept.length :].tolist(), kept))
                resumed.add(i)
        return resumed

    def _add_slots(self) -> None:
        """On a CPU, add slots for new rows. The memory of a GPU is allocated for all rows at once."""
        needed = min(self.num_rows, self.max_slots)
        if needed > self.num_slots:
            self.num_slots = min(max(needed, 2 * self.num_slots), self.max_slots)
            for group in self.groups:
                group.logits = None  # the slot with its prompt is no longer the spare one

    def take_samples(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the rows, tokens and log-probs of each step since the last call."""
        samples, self.samples = self.samples, []
        return samples

    def live_rows(self) -> list[int]:
        return self.live[ROW].tolist()

    def remove(self, rows: Collection[int]) -> None:
        """Remove rows that have not ended. Those that are live are kept if they have ids."""
        self.resumed = deque(entry for entry in self.resumed if entry[0] not in rows)
        for group in self.groups:
            group.rows = [row for row in group.rows if row not in rows]
        self.groups = deque(group for group in self.groups if group.rows)
        self.num_waiting = len(self.resumed) + sum(len(group.rows) for group in self.groups)
        is_removed = [row in rows for row in self.live_rows()]
        self._release_slots(torch.tensor(is_removed, dtype=torch.bool, device=self.device))

    def step(self) -> None:
        """Start waiting rows, or generate one token for each live row."""
        num_free = self.num_slots - self.live.shape[1]
        if self.num_waiting and num_free >= min(self.num_waiting, max(1, self.num_slots // REFILL)):
            self._fill_slots()
        else:
            self._decode()

    def generate(self) -> Generation:
        """Generate until all rows have ended."""
        start, num_rows = time.perf_counter(), self.num_rows
        num_steps = int((self.ends - self.lengths).max()) + 1
        # Inference tensors must not leave this context, so results are copied to normal tensors below.
        with torch.inference_mode(), counted(num_rows, "responses") as work, self.prepared(num_steps):
            while self.num_rows:
                work.done = num_rows - self.num_rows
                self.step()
        rows, tokens, log_probs = (torch.cat(steps) for steps in zip(*self.take_samples(), strict=True))
        order = rows.argsort(stable=True)  # a stable sort keeps the order of tokens within a row
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
        experts = None if self.recorder is None else self.recorder.result()
        num_cached = torch.tensor(self.num_cached) if self.row_ids else None
        log_probs = responses.like(log_probs[order])
        return Generation(responses, log_probs, self.finished.clone(), metrics, experts, num_cached)

    @contextmanager
    def prepared(self, num_steps: int) -> Iterator[None]:
        """Prepare the decoder for `step`, given the number of steps after which it may still be used."""
        with self.decoder.prepare(self.max_slots, num_steps, self.has_ids) as self.forward:
            yield

    def _fill_slots(self) -> None:
        """Admit waiting rows until no slot is free or no row is waiting."""
        while self.num_waiting and self.live.shape[1] < self.num_slots:
            if self.resumed:
                self._resume()
            elif self.groups[0].logits is None:
                self._prefill()
            else:
                self._start_cached()

    def _resume(self) -> None:
        """Compute the new tokens of as many kept rows as fit in one model call, and start them."""
        num_live, num_tokens = self.live.shape[1], 0
        rows: list[int] = []
        tokens: list[list[int]] = []
        starts: list[int] = []
        while self.resumed and num_live + len(rows) < self.num_slots:
            row, new_tokens, (cached, length) = self.resumed[0]
            num_tokens += len(new_tokens)
            if rows and num_tokens > self.max_tokens:
                break
            self.resumed.popleft()
            self._reserve(length + len(new_tokens), starts)
            self.cache.write(num_live + len(rows), cached, length)
            if self.kept is not None:
                self.kept.release(cached)
            rows, tokens, starts = [*rows, row], [*tokens, new_tokens], [*starts, length]
        lengths = [len(new_tokens) for new_tokens in tokens]
        step = ExtendStep(self.cache, lengths, starts, num_live, self.device)
        self._start(rows, self._compute([token for new_tokens in tokens for token in new_tokens], lengths, step))

    def _reserve(self, length: int, started: Sequence[int] = ()) -> None:
        """Reserve slots of `length` positions. `started` contains the lengths of rows behind the live ones."""
        if not self.cache.fits(self.num_slots + 1, length):
            spare = max((len(group.prompt) for group in self.groups if group.logits is not None), default=0)
            self.cache.reserve(self.num_slots + 1, length, [*self.live[POSITION].tolist(), *started], spare)

    def _compute(self, tokens: list[int], lengths: list[int], step: PrefillStep | ExtendStep) -> Tensor:
        """Compute packed tokens, and return the logits (rows, V) of the last token of each row."""
        input_ids = torch.tensor(tokens, device=self.device)[None]
        ends = (torch.tensor(lengths).cumsum(0) - 1).to(self.device)
        if self.recorder is not None:
            self.recorder.start()
        logits = self.hf(input_ids=input_ids, **step.kwargs, slots=step, logits_to_keep=ends).logits[0]
        self.cache.check_layers()
        self.prompt_tokens += len(tokens)
        return logits if len(logits) == len(lengths) else logits[ends]  # the model may ignore `logits_to_keep`

    def _prefill(self) -> None:
        """Compute as many waiting prompts as fit in one model call and start their rows."""
        prefills = self._pop_prompts()
        num_live = self.live.shape[1]
        sources = [i for i, (_, rows) in enumerate(prefills) for _ in rows]
        rows = [row for _, rows in prefills for row in rows]
        targets = list(range(num_live, num_live + len(rows)))
        last_group, last_rows = prefills[-1]
        has_waiting_rows = len(last_rows) < len(last_group.rows)
        if has_waiting_rows:
            sources, targets = [*sources, len(prefills) - 1], [*targets, self.num_slots]
        lengths = [len(group.prompt) for group, _ in prefills]
        self._reserve(max(lengths))
        step = PrefillStep(self.cache, lengths, sources, targets, self.device)
        logits = self._compute([token for group, _ in prefills for token in group.prompt], lengths, step)
        if self.recorder is not None:
            self.recorder.add_prompts([(group.rows, len(group.prompt)) for group, _ in prefills])
        if has_waiting_rows:
            self.groups.appendleft(_PrefixGroup(last_group.prompt, last_group.rows[len(last_rows) :], logits[-1:]))
        self._start(rows, logits[torch.tensor(sources[: len(rows)], device=self.device)])

    def _pop_prompts(self) -> list[tuple[_PrefixGroup, list[int]]]:
        """Remove the next prompts from the queue and return each with the rows that get a slot."""
        num_free = self.num_slots - self.live.shape[1]
        prefills: list[tuple[_PrefixGroup, list[int]]] = []
        tokens = 0
        while self.groups and num_free and (not prefills or tokens + len(self.groups[0].prompt) <= self.max_tokens):
            group = self.groups.popleft()
            rows = group.rows[:num_free]
            prefills.append((group, rows))
            tokens += len(group.prompt)
            num_free -= len(rows)
        return prefills

    def _start_cached(self) -> None:
        """Start rows whose prompt is cached in the spare slot."""
        group = self.groups.popleft()
        assert group.logits is not None
        num_live = self.live.shape[1]
        rows, waiting_rows = group.rows[: self.num_slots - num_live], group.rows[self.num_slots - num_live :]
        targets = torch.arange(num_live, num_live + len(rows), device=self.device)
        self.cache.copy(torch.full_like(targets, self.num_slots), targets, torch.full_like(targets, len(group.prompt)))
        if waiting_rows:
            self.groups.appendleft(_PrefixGroup(group.prompt, waiting_rows, group.logits))
        self._start(rows, group.logits.expand(len(rows), -1))

    def _start(self, rows: list[int], logits: Tensor) -> None:
        """Sample the first token of new rows, whose prompts are cached in the slots after the live rows."""
        index = torch.tensor(rows, device=self.device)
        positions, seeds = self.lengths[index], self.seeds[index]
        tokens = self._sample(logits, index, uniform_numbers(seeds, positions))
        self.live = torch.cat([self.live, torch.stack([tokens, positions, self.ends[index], seeds, index])], dim=1)
        self.uniforms = self.uniforms.new_empty(0, self.live.shape[1])
        self._update_live_rows()
        self.num_waiting -= len(rows)
        self._remove_ended()

    def _decode(self) -> None:
        """Generate one token for each live row."""
        self._reserve(self.max_position + 1)
        if self.decode_step is None or not self.decode_step.advance([length for _, length in self.classes]):
            self._form_classes()
            self.decode_step = DecodeStep(self.cache, self.live[POSITION], self.classes)
        tokens, positions, _, seeds, rows = self.live
        if self.recorder is not None:
            self.recorder.start()
        logits = self.forward(tokens, positions, self.decode_step)
        if self.recorder is not None:
            self.recorder.add_step(rows)
        positions += 1
        self.max_position += 1
        self.classes = [(size, length + 1) for size, length in self.classes]
        self.steps_to_limit -= 1
        if not len(self.uniforms):
            self.uniforms = uniform_numbers(seeds, positions + torch.arange(UNIFORM_STEPS, device=self.device)[:, None])
        tokens.copy_(self._sample(logits, rows, self.uniforms[0]))
        self.uniforms = self.uniforms[1:]
        self.steps += 1
        self.row_steps += len(rows)
        self._remove_ended()

    def _sample(self, logits: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
        """Sample the next token of each row and record it with its log-prob."""
        sampling = self.sampling
        if self.penalties is not None:
            logits = self.penalties.apply(logits, rows)
        if sampling.greedy:
            tokens, log_probs = sample_greedy(logits)
        else:
            tokens, log_probs = self._draw(logits, uniforms)
        if self.penalties is not None:
            self.penalties.add(rows, tokens)
        self.samples.append((rows, tokens, log_probs))
        if self.stop_strings is not None:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                self.responses[row].append(token)
        return tokens

    def _draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Sample the next token of each row with its uniform number."""
        sampling = self.sampling
        fused = supports_triton(logits) and logits.dtype != torch.float64
        if fused and sampling.top_k <= 0 and sampling.top_p == 1 and sampling.min_p == 0:
            return fused_draw(logits, uniforms, sampling.temperature)
        scores = restrict(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        return fused_draw(scores, uniforms) if fused else draw(scores, uniforms)

    def _remove_ended(self) -> None:
        """Remove ended rows and move the last rows into their slots."""
        is_stopped = self._stop_mask()
        # `any` synchronizes with the device, once per step.
        if self.steps_to_limit > 0 and (is_stopped is None or not bool(is_stopped.any())):
            return
        has_ended = self.live[POSITION] >= self.live[END]
        if is_stopped is not None:
            has_ended |= is_stopped
            self.finished[self.live[ROW]] = is_stopped
        self._release_slots(has_ended)

    def _release_slots(self, is_removed: Tensor) -> None:
        """Remove live rows, given a mask of their slots, and move the last rows into their slots."""
        if self.kept is not None and self.row_ids:
            for slot in is_removed.nonzero()[:, 0].tolist():
                length, row = self.live[[POSITION, ROW], slot].tolist()
                self.kept.add(self.row_ids[row], self.cache.read(slot, length))
        live_slots = (~is_removed).nonzero()[:, 0]
        order = torch.arange(len(live_slots), device=self.device)
        sources = live_slots[live_slots >= len(live_slots)]
        if len(sources):
            free_slots = is_removed[: len(live_slots)].nonzero()[:, 0]
            self.cache.copy(sources, free_slots, self.live[POSITION, sources])
            order[free_slots] = sources
        self._reorder(order)
        self._update_live_rows()

    def _reorder(self, order: Tensor) -> None:
        self.live, self.uniforms = self.live.index_select(1, order), self.uniforms.index_select(1, order)

    def _form_classes(self) -> None:
        """Divide the live rows into length classes. On a GPU, attention reads each row to its own length anyway."""
        self.classes = [(self.live.shape[1], self.max_position + 1)]
        if self.device.type == "cpu":
            if self.max_position >= SHORTEST:
                self.classes, order = arrange(self.cache, (self.live[POSITION] + 1).tolist())
                self._reorder(order)
            free = [0] * (self.num_slots - self.live.shape[1])
            self.cache.trim([*(self.live[POSITION] + 1).tolist(), *free])

    def _stop_mask(self) -> Tensor | None:
        """Return a bool mask (live rows,) of rows that a stop token or string has ended; None if there are no stops."""
        by_token = (self.live[TOKEN][:, None] == self.stop_ids).any(dim=1) if len(self.stop_ids) else None
        if self.stop_strings is None:
            return by_token
        responses = [self.responses[row] for row in self.live[ROW].tolist()]
        by_string = torch.tensor([self.stop_strings.is_ended_by(tokens) for tokens in responses], device=self.device)
        return by_string if by_token is None else by_token | by_string

    def _update_live_rows(self) -> None:
        """Update the attributes that depend on the set of live rows."""
        self.decode_step = None
        positions, ends = self.live[POSITION], self.live[END]
        self.max_position = self.steps_to_limit = 0
        if len(positions):
            self.max_position, self.steps_to_limit = int(positions.max()), int((ends - positions).min())


def fused_draw(scores: Tensor, uniforms: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Call `cuda.sampling.draw`. Its module imports Triton."""
    from camshaft.rollout.builtin.cuda import sampling

    return sampling.draw(scores, uniforms, temperature)


def _group_equal_prompts(prompts: Sequence[Tensor], without: set[int], first: int) -> list[_PrefixGroup]:
    """Group rows with equal prompts, in the order of first appearance, except for some rows. Add `first` to numbers."""
    groups: dict[bytes, _PrefixGroup] = {}
    for row, tokens in enumerate(prompts):
        if row in without:
            continue
        key = tokens.numpy().tobytes()
        if key not in groups:
            groups[key] = _PrefixGroup(tokens.tolist(), [])
        groups[key].rows.append(first + row)
    return list(groups.values())
