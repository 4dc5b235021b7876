"""The rollout that runs in the child process of `SGLangRollout`.

Do not build it in any other process, because an SGLang engine may kill its process and all children of the process.
"""

import time
from collections.abc import Iterable, Mapping

from torch import Tensor

from camshaft.config.backends import SGLANG
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, SamplingParams
from camshaft.rollout.external import ExternalRollout
from camshaft.rollout.sglang.engine import SGLangEngine
from camshaft.rollout.stop_strings import truncate_at_stop_strings
from camshaft.rollout.weights.checks import drop_tied_duplicates


class SGLangChildRollout(ExternalRollout):
    """Generate with an SGLang engine. The same seeds give the same samples as with the built-in generator."""

    capabilities = SGLANG

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self._digests: dict[str, int] | None = None
        self.engine = SGLangEngine(config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        self.check_ready_to_load()
        self._digests = None
        canonical_names, received = self.expected.canonical_names, dict[str, str]()

        def validated() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in self.expected.validate(weights):
                received[name] = canonical_names[name]
                yield name, tensor.to(self.expected.weights[name].meta.dtype)

        digests = self.engine.load(drop_tied_duplicates(validated(), canonical_names, set()))
        self._digests = {name: digests[canonical] for name, canonical in received.items()}
        self.version = version

    def weight_digests(self) -> Mapping[str, int]:
        """Return the checksums of the weights in SGLang's model.

        For a weight that SGLang converts, this is the checksum of the received tensor.
        """
        self.check_ready()
        assert self._digests is not None
        return self._digests

    def has_weights(self) -> bool:
        return self._digests is not None

    def sleep(self) -> None:
        self.engine.sleep()
        self._asleep, self._digests = True, None

    def wake_up(self) -> None:
        self.engine.wake_up()
        self._asleep = False

    def generate_sequences(
        self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None, generated: Ragged | None = None
    ) -> Generation:
        start = time.perf_counter()
        rows = self.start_rows(prompts, sampling, seeds, generated)
        requests, strings = self.build_requests(rows), self.stop_strings(sampling)
        responses = self.engine.generate(requests, sampling, self.all_stop_ids(sampling)) if requests else []
        generation = self.build_generation(rows, responses, time.perf_counter() - start)
        if strings is not None:
            generation = truncate_at_stop_strings(generation, strings, rows.generated)
        return rows.complete(generation)
