"""Captured decode steps, with a CPU stand-in for CUDA graphs, generate the same tokens as eager steps."""

import inspect
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorders import OperatorCapture, TouchedDevices
from support.tiny import CHANGED_SCORES, DECODED, tiny_folder
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.contracts.rollout.suite import RULES
from camshaft.contracts.rules import Rule, Violation
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.base import Generation
from camshaft.rollout.builtin.cpu.traced_decoder import Decoder
from camshaft.rollout.builtin.cuda import graphs
from camshaft.rollout.builtin.cuda.graphs import (
    CUDAGraphCapture,
    CUDAGraphDecoder,
    MakeStep,
    build_graph_decoder,
    full_length_step,
    padded_rows,
)
from camshaft.rollout.builtin.kv_cache import LENGTH_MULTIPLE, KVCache
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.builtin.steps import DecodeStep, PrefillStep

SLOTS = 7
"""One less than a captured batch size, so that the next cache slot keeps a prompt."""

FAMILIES = DECODED | {"mixtral": {"num_local_experts": 4}} | CHANGED_SCORES
"""Families with experts, soft-caps and sinks."""

SHORT = ("qwen2", "qwen3_next", "mixtral", *CHANGED_SCORES)
"""Families of `make test`: the default, with recurrent states, with experts, with soft-caps and with sinks."""


class Recorded(TorchRollout):
    """The built-in generator with captured steps on a CPU."""

    make_step: MakeStep = staticmethod(full_length_step)

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.graphs: CUDAGraphDecoder = CUDAGraphDecoder(
            self.decoder, self.cache, OperatorCapture(), type(self).make_step
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def harness(folder: Path) -> RolloutHarness:
    return RolloutHarness(Recorded, folder)


def steps_of(case: Case) -> Any:
    rollout: Any = case.rollout
    return rollout.graphs


def count(case: Case) -> int:
    return steps_of(case).graph_capture.count


def many_prompts(harness: RolloutHarness) -> Ragged:
    """Return more rows than cache slots, with prompts whose KV cache is kept for waiting rows."""
    return harness.prompts(3, 11, 1, 5, LENGTH_MULTIPLE - 2).select([0, 1, 1, 2, *[3] * 10, *[4] * 4])


SAMPLING = SamplingParams(24, temperature=1.1, stop_token_ids=(10, 11, 12))
"""Rows end at any time, and rows of a long prompt exceed the length of their cache slots."""


def checked_generation(case: Case, prompts: Ragged, sampling: SamplingParams = SAMPLING) -> Generation:
    """Return a generation after checking its log-probs against the oracle."""
    out = case.rollout.generate_sequences(prompts, sampling, torch.arange(len(prompts)))
    case.check_log_probs(prompts, out, sampling)
    return out


def same(actual: Generation, expected: Generation) -> bool:
    return torch.equal(actual.responses.lengths, expected.responses.lengths) and torch.equal(
        actual.responses.values, expected.responses.values
    )


# -- generation with captured steps ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "temperature"),
    [
        ("qwen2", 1.1),
        ("qwen2", 0.0),
        *((family, 1.1) for family in CHANGED_SCORES),
        pytest.param("mixtral", 1.1, marks=pytest.mark.slow),
        *(pytest.param(family, 1.1, marks=pytest.mark.slow) for family in FAMILIES if family not in SHORT),
        *(pytest.param(family, 0.0, marks=pytest.mark.slow) for family in FAMILIES if family != "qwen2"),
    ],
)
def test_captured_steps_match_eager_steps(
    harness: RolloutHarness, folder: Path, family: str, temperature: float
) -> None:
    sampling = SamplingParams(24, temperature=temperature, stop_token_ids=(10, 11, 12))
    case = harness.case(family, FAMILIES[family], max_num_seqs=SLOTS)
    eager = RolloutHarness(TorchRollout, folder).case(family, FAMILIES[family], max_num_seqs=SLOTS)
    expected = eager.rollout.generate_sequences(many_prompts(harness), sampling, torch.arange(18))
    actual = checked_generation(case, many_prompts(harness), sampling)
    assert same(actual, expected)
    assert not temperature or len(set(actual.responses.lengths.tolist())) > 2  # rows end and join at any time
    assert steps_of(case).cache.length > LENGTH_MULTIPLE  # the KV cache has grown
    assert count(case) > len(steps_of(case).replays)  # which captured all steps again


FAST_RULES = {
    "rows do not depend on the batch", "prompts of mixed lengths", "new weights replace old ones", "sleep and wake",
}  # fmt: skip
"""Rules about the state that captured steps share; the others repeat the comparison with eager steps."""


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[pytest.mark.slow] * (rule.name not in FAST_RULES)) for rule in RULES],
    ids=lambda rule: rule.name.replace(" ", "_"),
)
def test_captured_steps_keep_rule(rule: Rule, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MIN_STEPS", 1)
    rule.check(RolloutHarness(Recorded, folder))


def test_a_second_generation_captures_nothing(harness: RolloutHarness) -> None:
    case = harness.case(max_num_seqs=SLOTS)
    first = checked_generation(case, many_prompts(harness))
    checked_generation(case, many_prompts(harness))  # with cache slots of full length from the start
    before = count(case)
    assert same(checked_generation(case, many_prompts(harness)), first)
    assert count(case) == before


def test_only_larger_batches_are_captured_again(harness: RolloutHarness) -> None:
    case, few = harness.case(max_num_seqs=16), harness.prompts(3, 4, 5)
    first = checked_generation(case, few)
    checked_generation(case, many_prompts(harness))
    checked_generation(case, many_prompts(harness))
    before = steps_of(case).graph_capture.released
    assert same(checked_generation(case, few), first)
    assert steps_of(case).graph_capture.released == before
    assert {3, 16} <= set(steps_of(case).replays)


def test_captured_graphs_see_in_place_updates(harness: RolloutHarness) -> None:
    case, prompts = harness.case(), harness.prompts(4, 9)
    sampling = SamplingParams(16, ignore_eos=True)
    before = checked_generation(case, prompts, sampling)
    captures = count(case)
    for weight in case.oracle.parameters():
        weight.data.mul_(0.8)
    after = checked_generation(case, prompts, sampling)
    assert count(case) == captures
    assert not torch.equal(before.log_probs.values, after.log_probs.values)


def test_other_weights_are_captured_again(harness: RolloutHarness) -> None:
    case, prompts = harness.case(), harness.prompts(4, 9)
    sampling = SamplingParams(16, ignore_eos=True)
    checked_generation(case, prompts, sampling)
    captures = count(case)
    for weight in case.oracle.parameters():
        weight.data.mul_(0.8)
    case.rollout.load_weights([(name, weight.detach().clone()) for name, weight in case.weights()])
    checked_generation(case, prompts, sampling)
    assert count(case) > captures


def test_graphs_that_outlive_a_sleep_read_the_weights_of_each_sync(harness: RolloutHarness) -> None:
    case, prompts = harness.empty_case(free_cache_engine=False), harness.prompts(4, 9)
    sampling, captures, released = SamplingParams(16, ignore_eos=True), [], []
    for factor in (1.0, 0.8, 0.9):
        for weight in case.oracle.parameters():
            weight.data.mul_(factor)
        case.rollout.load_weights([(name, weight.detach().clone()) for name, weight in case.weights()])
        checked_generation(case, prompts, sampling)
        captures.append(count(case))
        released.append(steps_of(case).graph_capture.released)
        case.rollout.sleep()
        case.rollout.wake_up()
    assert len(set(captures)) == len(set(released)) == 1


@pytest.mark.parametrize("free", [True, False])
def test_sleep_releases_graphs_unless_the_cache_stays(harness: RolloutHarness, free: bool) -> None:
    case, prompts = harness.case(free_cache_engine=free), harness.prompts(4, 9)
    sampling = SamplingParams(16, ignore_eos=True)
    first, steps = checked_generation(case, prompts, sampling), steps_of(case)
    captures, released = count(case), steps.graph_capture.released
    case.rollout.sleep()
    assert bool(steps.replays) != free
    assert steps.graph_capture.released == released + free
    case.rollout.wake_up()
    case.rollout.load_weights(case.weights())
    assert same(checked_generation(case, prompts, sampling), first)
    assert (count(case) > captures) == free  # the weights are the same tensors again


def test_short_calls_and_models_with_hooks_run_eagerly(harness: RolloutHarness) -> None:
    case, prompts = harness.case(), harness.prompts(4, 9)
    checked_generation(case, prompts, SamplingParams(graphs.MIN_STEPS - 1, ignore_eos=True))
    assert count(case) == 0
    calls: list[int] = []
    hook = steps_of(case).hf.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    checked_generation(case, prompts, SamplingParams(40, ignore_eos=True))
    assert (len(calls), count(case)) == (40, 0)
    hook.remove()
    checked_generation(case, prompts, SamplingParams(40, ignore_eos=True))
    assert (len(calls), count(case)) == (40, 1)


def test_a_model_that_looks_at_values_runs_eagerly(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The frequencies depend on the values of the positions, which a capture must not read."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    family = ("llama", {"rope_parameters": rope, "max_position_embeddings": 96})
    case, eager = (RolloutHarness(cls, folder).case(*family) for cls in (Recorded, TorchRollout))
    sampling = SamplingParams(16, ignore_eos=True)
    prompts = RolloutHarness(Recorded, folder).prompts(4, 9)
    for _ in range(2):
        assert same(checked_generation(case, prompts, sampling), checked_generation(eager, prompts, sampling))
    (record,) = (record for record in caplog.records if "CUDA graph" in record.getMessage())
    assert record.levelname == "WARNING"
    for text in ("LlamaForCausalLM", "RuntimeError: ", "is not permitted", "rollout.enforce_eager=true"):
        assert text in record.getMessage()
    assert count(case) == 1


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, ValueError])
def test_a_capture_that_fails_later_leaves_eager_steps(
    error: type[Exception], harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first batch size is captured; the second one, in the middle of a generation, is not."""
    case = harness.case(max_num_seqs=SLOTS)
    expected = checked_generation(case, many_prompts(harness))
    steps = steps_of(case)
    capture, calls = steps.graph_capture.capture, []

    def failing(function: Callable[[], None]) -> Callable[[], None]:
        calls.append(function)
        if len(calls) == 2:
            function()
            raise error("no graph\nsecond line")
        return capture(function)

    monkeypatch.setattr(steps.graph_capture, "capture", failing)
    steps.release()
    for _ in range(2):
        assert same(checked_generation(case, many_prompts(harness)), expected)
    assert len(calls) == 2
    assert not steps.replays
    (record,) = (record for record in caplog.records if "CUDA graph" in record.getMessage())
    assert f"({error.__name__}: no graph). Decode" in record.getMessage()


def test_a_step_that_fails_itself_raises_its_error(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    case = harness.case()

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("the step is broken")

    monkeypatch.setattr(steps_of(case), "eager", broken)
    with pytest.raises(ZeroDivisionError, match="the step is broken"):
        case.rollout.generate_sequences(harness.prompts(4), SamplingParams(16, ignore_eos=True))


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.slow] * (family not in SHORT)) for family in FAMILIES]
)
def test_no_operator_of_a_step_touches_the_host(family: str) -> None:
    """Capture would freeze or reject such an operator, so all tensors of a step must be on the device."""
    config = RolloutEngineConfig(model_path=str(tiny_folder(family, **FAMILIES[family])), dtype="bfloat16")
    for device in ("meta", "cpu"):
        rollout = TorchRollout(config)
        rollout.model.hf.to_empty(device=device)
        rollout.cache.reserve(5, LENGTH_MULTIPLE)
        tokens, positions = torch.zeros(2, 4, dtype=torch.int64, device=device)
        prefill = PrefillStep(rollout.cache, [1], [0], [0], torch.device(device))
        with torch.inference_mode():  # allocates the cache
            rollout.model.hf(input_ids=tokens[None, :1], slots=prefill, **prefill.kwargs)
        with torch.inference_mode(), TouchedDevices() as touched:
            logits = rollout.decoder.eager(tokens, positions, full_length_step(rollout.cache, positions))
        assert touched.devices == {logits.device.type} == {device}


# -- tests of the stand-in: it detects a step that depends on more --------------------------------


def _length_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a Python number for the cache length, the longest row, as steps without capture do."""
    real, now = CUDAGraphDecoder._forward, [0]

    def forward(self: CUDAGraphDecoder, num_rows: int, tokens: Tensor, positions: Tensor, slots: DecodeStep) -> Tensor:
        now[0] = slots.spans[0][1]
        return real(self, num_rows, tokens, positions, slots)

    monkeypatch.setattr(CUDAGraphDecoder, "_forward", forward)
    monkeypatch.setattr(
        Recorded, "make_step", staticmethod(lambda cache, at: DecodeStep(cache, at, [(len(at), now[0])]))
    )


def _mask_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a mask that was created once for the positions at that time."""
    steps: dict[int, DecodeStep] = {}

    def step(cache: KVCache, positions: Tensor) -> DecodeStep:
        if len(positions) not in steps or steps[len(positions)].cache is not cache:
            steps[len(positions)] = full_length_step(cache, positions.clone())  # pyright: ignore[reportArgumentType]
        return steps[len(positions)]

    monkeypatch.setattr(Recorded, "make_step", staticmethod(step))


def _any_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "tensor_layouts", lambda hf: ())


def _any_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "reallocations", property(lambda self: 0, lambda self, value: None), raising=False)


def _rows_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the rows that pad a batch to the cache slot of a kept prompt."""
    real = CUDAGraphDecoder._forward
    monkeypatch.setattr(CUDAGraphDecoder, "_forward", lambda self, num_rows, *rest: real(self, num_rows + 1, *rest))
    monkeypatch.setattr(graphs, "padded_rows", lambda rows: SLOTS + 1)


MISTAKES: list[Callable[[pytest.MonkeyPatch], None]] = [
    _length_of_python, _mask_of_before, _any_weights, _any_slots, _rows_of_others,
]  # fmt: skip


def run_generations(harness: RolloutHarness) -> None:
    """Run generations in the order of a training run."""
    case = harness.case(max_num_seqs=SLOTS)
    steps_of(case)._capacity = SLOTS + 1
    for scale in (1.0, 0.8):
        weights = [(name, weight.data.mul_(scale).clone()) for name, weight in case.weights()]
        case.rollout.load_weights(weights)
        checked_generation(case, many_prompts(harness))


def test_generations_are_correct_without_a_fault(harness: RolloutHarness) -> None:
    run_generations(harness)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_fault_is_detected(
    mistake: Callable[[pytest.MonkeyPatch], None], harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(Violation, match="log-probs are off by"):
        run_generations(harness)


# -- conditions for capture -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "eager", "captured"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_graphs_are_captured_on_a_gpu_by_config(device: str, eager: bool, captured: bool) -> None:
    config = RolloutEngineConfig(model_path=str(tiny_folder()), device=device, enforce_eager=eager)
    hf: Any = torch.nn.Linear(1, 1)
    steps = build_graph_decoder(Decoder(hf), None, config)  # pyright: ignore[reportArgumentType]
    assert (steps is not None) == captured
    assert steps is None or isinstance(steps.graph_capture, CUDAGraphCapture)


def test_a_cpu_uses_the_traced_decoder_without_graphs(folder: Path) -> None:
    harness = RolloutHarness(TorchRollout, folder)
    case, eager = harness.case(enforce_eager=False), harness.case()
    rollout: Any = case.rollout
    assert rollout.graphs is None
    assert same(checked_generation(case, many_prompts(harness)), checked_generation(eager, many_prompts(harness)))
    assert rollout.decoder._traced is not None


def test_numbers_of_rows_that_are_captured() -> None:
    sizes = [padded_rows(rows) for rows in range(1, 1025)]
    assert sorted(set(sizes[:256])) == [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    assert all(rows <= up < rows + max(8, rows / 4) for rows, up in enumerate(sizes, 1))
    assert all(padded_rows(up) == up for up in sizes)
    assert len(set(sizes)) < 32


class Backend:
    """The device functions that graph capture uses, with the signatures of torch.cuda."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.stream_now: Any = "main"
        self.streams = 0

    @contextmanager
    def _inside(self, *call: Any) -> Any:
        self.calls.append(call)
        before, self.stream_now = self.stream_now, call[1] if call[0] == "stream" else self.stream_now
        try:
            yield
        finally:
            self.stream_now = before
            self.calls.append(("end", call[0]))

    def Stream(self) -> Any:
        backend = self
        self.streams += 1

        class Side:
            def wait_stream(self, other: Any) -> None:
                backend.calls.append(("side waits", other))

        return Side()

    def current_stream(self) -> Any:
        backend = self

        class Main:
            def wait_stream(self, other: Any) -> None:
                backend.calls.append(("main waits",))

            def __eq__(self, other: object) -> bool:
                return other == "main"

        return Main()

    def graph_pool_handle(self) -> int:
        self.calls.append(("cache",))
        return len(self.calls)

    def CUDAGraph(self) -> Any:
        backend = self

        class Graph:
            def replay(self) -> None:
                backend.calls.append(("replay",))

        return Graph()

    def device(self, device: Any) -> Any:
        return self._inside("device", device)

    def stream(self, stream: Any) -> Any:
        return self._inside("stream", stream)

    def graph(self, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(torch.cuda.graph.__init__).bind(None, *args, **kwargs).arguments
        assert arguments["stream"] is self.stream_now
        return self._inside("graph", arguments["pool"], arguments["capture_error_mode"])

    def empty_cache(self) -> None:
        self.calls.append(("emptied",))


def test_graphs_are_captured_after_warmup_in_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend()
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    recorder = CUDAGraphCapture(torch.device("cuda"))
    recorder.release()
    assert not backend.calls
    replay = recorder.capture(lambda: backend.calls.append(("run",)))
    kinds = [call[0] for call in backend.calls]
    assert kinds == [
        "device", "cache", "side waits", "stream", "run", "graph", "run", "end", "end", "main waits", "end"
    ]  # fmt: skip
    (capture,) = (call for call in backend.calls if call[0] == "graph")
    assert capture[2] == "thread_local"
    replay()
    assert backend.calls[-1] == ("replay",)
    recorder.capture(lambda: None)
    recorder.release()
    assert backend.calls[-1] == ("emptied",)
    recorder.capture(lambda: None)
    first, second, third = (call[1] for call in backend.calls if call[0] == "graph")
    assert first == second != third
    assert backend.streams == 1
    with pytest.raises(ZeroDivisionError):
        recorder.capture(lambda: 1 // 0)  # pyright: ignore
    assert backend.stream_now == "main"
