"""Expert choices of the built-in generator for a mixture-of-experts model.

    recorder = RoutingRecorder(routers, num_rows)
    recorder.start();  hf(...);  recorder.add_prompts([([0, 1], 5), ([2], 3)])     # prefill of two prompts
    recorder.start();  hf(...);  recorder.add_step(rows)                           # decode step
    recorder.result()                                                              # one row per response

The scheduler records the choices of every model call. Each choice takes one byte, or two with 256 experts or more.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from camshaft.models.routing import Routers
from camshaft.ragged import Ragged


class RoutingRecorder:
    """Recorder of the expert choices of one `generate_sequences` call."""

    def __init__(self, routers: Routers, num_rows: int):
        self.routers = routers
        self._prompts: list[Tensor | None] = [None] * num_rows
        self._steps: list[tuple[Tensor, Tensor]] = []

    def start(self) -> None:
        self.routers.start()

    def add_prompts(self, prompts: Sequence[tuple[Sequence[int], int]]) -> None:
        """Store the choices for packed prompts. Each has a length and the rows that continue it."""
        choices = self._finish().split([length for _, length in prompts])
        for (rows, _), experts in zip(prompts, choices, strict=True):
            for row in rows:
                self._prompts[row] = experts

    def add_step(self, rows: Tensor) -> None:
        """Store the choices for the last tokens of `rows`, which a decode step has computed."""
        self._steps.append((rows, self._finish()))

    def result(self) -> Ragged:
        """Return the choices (tokens, layers, top-k) for all prompt and response tokens of each row.

        The model has not computed the last token of a row. Its entries are `Routers.unknown`.
        """
        prompts = Ragged.from_rows([prompt for prompt in self._prompts if prompt is not None])
        last = prompts.values.new_full((len(prompts), *prompts.values.shape[1:]), self.routers.unknown)
        ends = Ragged(last, torch.ones(len(prompts), dtype=torch.int64))
        if not self._steps:
            return Ragged.join(prompts, ends)
        rows, choices = (torch.cat(parts) for parts in zip(*self._steps, strict=True))
        order = rows.argsort(stable=True)  # a stable sort keeps the order of tokens within a row
        responses = Ragged(choices[order], rows.bincount(minlength=len(prompts)).cpu())
        return Ragged.join(Ragged.join(prompts, responses), ends)

    def _finish(self) -> Tensor:
        layers = self.routers.finish()
        return torch.stack([layer.choices for layer in layers], dim=1).to(self.routers.dtype)
