"""Operator graphs compute the model's forward with the current weights, or are not used."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import DECODED
from torch import Tensor, nn

from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cpu import graph_fusions, traced_decoder
from camshaft.rollout.builtin.cpu.linears import MIN_ROWS, MIN_STEPS
from camshaft.rollout.builtin.cpu.traced_decoder import Decoder
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.builtin.tracer import TraceError, trace

FAMILIES = DECODED | {"phi3": {}, "glm": {}}
FAST = ("qwen2", "gemma3_text", "phi3", "qwen3_next")
"""Families of `make test`: the default, one with sliding windows, one with fused projections, one with states."""

each_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in FAMILIES]
)
"""Families with other projections and rotations."""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> RolloutHarness:
    return RolloutHarness(TorchRollout, tmp_path_factory.mktemp("models"))


def decoder_of(case: Case) -> Decoder:
    rollout: Any = case.rollout
    return rollout.decoder


def checked_generation(harness: RolloutHarness, case: Case) -> Tensor:
    """Return the log-probs of a generation after comparing them with the model's, also with few remaining rows."""
    prompts = harness.prompts(4, 9, 2, 14).select([0, 0, 1, 2, 3])
    sampling = SamplingParams(MIN_STEPS + 8, temperature=0.9, stop_token_ids=(5, 6, 7, 8), ignore_eos=True)
    out = case.rollout.generate_sequences(prompts, sampling, torch.arange(5))
    assert len(set(out.responses.lengths.tolist())) > 1
    case.check_log_probs(prompts, out, sampling)
    return out.log_probs.values


@each_family
def test_a_graph_matches_transformers(harness: RolloutHarness, family: str) -> None:
    case = harness.case(family, FAMILIES[family])
    checked_generation(harness, case)
    assert decoder_of(case).reason is None


@each_family
def test_without_fusion_the_graph_matches_the_forward_bitwise(
    harness: RolloutHarness, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced_decoder, "fuse", lambda graph: None)
    monkeypatch.setattr(traced_decoder, "TOLERANCE", 0.0)
    decoder = decoder_of(harness.case(family, FAMILIES[family]))
    with decoder.prepare(MIN_ROWS, MIN_STEPS) as forward:
        assert decoder.reason is None
        assert forward != decoder.eager


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_an_untraceable_model_runs_its_forward(harness: RolloutHarness, family: str) -> None:
    case = harness.case(family, {"num_local_experts": 4} if family == "mixtral" else {})
    checked_generation(harness, case)
    assert "writes in place" in str(decoder_of(case).reason)


def test_other_dtypes_run_without_tracing(harness: RolloutHarness) -> None:
    case = harness.case(dtype="float64")
    checked_generation(harness, case)
    assert decoder_of(case).reason == "traced decoding requires float32 on a CPU"


def test_a_graph_uses_the_current_weights(harness: RolloutHarness) -> None:
    case = harness.case("qwen2")
    before = checked_generation(harness, case)
    for weight in case.oracle.parameters():
        weight.data.mul_(0.9)  # in place, without notice
    changed = checked_generation(harness, case)
    case.rollout.load_weights([(name, weight.detach().clone()) for name, weight in case.weights()])
    assert torch.equal(checked_generation(harness, case), changed)
    assert not torch.equal(before, changed)
    case.rollout.sleep()
    case.rollout.wake_up()
    for weight in case.oracle.parameters():
        weight.data.mul_(1.1)
    case.rollout.load_weights([(name, weight.detach().clone()) for name, weight in case.weights()])
    assert not torch.equal(checked_generation(harness, case), changed)


def test_non_finite_weights_do_not_disable_tracing(harness: RolloutHarness) -> None:
    case = harness.case("llama")
    case.rollout.load_weights([(name, weight.detach() * float("nan")) for name, weight in case.weights()])
    with pytest.raises(RolloutError, match="not finite"):
        case.rollout.generate_sequences(harness.prompts(4).select([0] * MIN_ROWS), SamplingParams(MIN_STEPS))
    case.rollout.load_weights(case.weights())
    checked_generation(harness, case)
    decoder = decoder_of(case)
    with decoder.prepare(MIN_ROWS, MIN_STEPS) as forward:
        assert forward != decoder.eager


def test_short_calls_and_hooked_models_are_not_traced(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_decoder, "limited_threads", lambda forward, model: nullcontext(forward))
    case = harness.case("llama")
    decoder = decoder_of(case)
    for rows, steps in ((MIN_ROWS - 1, MIN_STEPS), (MIN_ROWS, MIN_STEPS - 1)):
        with decoder.prepare(rows, steps) as forward:
            assert forward == decoder.eager
    with decoder.prepare(MIN_ROWS, MIN_STEPS) as forward:
        assert forward != decoder.eager
    calls: list[int] = []
    decoder.hf.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))  # pyright: ignore
    checked_generation(harness, case)
    assert len(calls) > MIN_STEPS


def test_a_graph_with_different_logits_is_not_used(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, eps: float) -> Tensor:
        return x * 1.001

    monkeypatch.setattr(graph_fusions, "scale_by_rms", wrong)
    case = harness.case("llama")
    checked_generation(harness, case)
    assert "from those of the model for 1 rows" in str(decoder_of(case).reason)


# -- supported forward code -----------------------------------------------------------------------


class Model(nn.Module):
    """A forward of one function of (rows, 4)."""

    def __init__(self, func: Callable[[Tensor], Tensor]):
        super().__init__()
        self.func = func
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.func(self.layer(x))


def inputs(rows: int) -> dict[str, Tensor]:
    return {"x": torch.arange(4.0 * rows).view(rows, 4).sin()}


FINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sizes": lambda x: x.view(-1).view(x.shape[0], 2, 2).reshape(2 * x.shape[0], 2).view(x.shape[0], -1),
    "parts": lambda x: torch.cat([part * 2 for part in x.split(1, dim=-1)][::-1], -1) + x.topk(1).values,
    "properties": lambda x: x.T.mT * x.dim(),
    "factories": lambda x: x + torch.ones(x.shape[0], 1) * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "masks": lambda x: x.masked_fill(x > 0, 1.0)[..., None, :].squeeze(1),
}


@pytest.mark.parametrize("func", FINE.values(), ids=FINE)
def test_a_graph_is_valid_for_any_number_of_rows(func: Callable[[Tensor], Tensor]) -> None:
    model = Model(func)
    graph = trace(model, inputs, model)
    graph_fusions.fuse(graph)
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(code.src, scope)
    for rows in (1, 2, 8):
        x = inputs(rows)["x"]
        assert torch.equal(scope["forward"](model, x, rows), model(x))


HELD = torch.ones(4)
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "value": (lambda x: x * x.sum().item(), "item reads the values"),
    "choice": (lambda x: x if x.sum() > 0 else -x, "__bool__ reads the values"),
    "list": (lambda x: x * x.tolist()[0][0], "tolist reads the values"),
    "in place": (lambda x: x.add_(1), "add_ writes in place"),
    "assignment": (lambda x: [x, x.__setitem__(0, 1.0)][0], "__setitem__ writes in place"),
    "foreign": (lambda x: x * HELD, r"a tensor of shape \(4,\) is neither"),
    "number": (lambda x: x * (x.shape[0] + 1), "4 or 6, depending on the batch size"),
    "path": (lambda x: x * 2 if x.shape[0] > 3 else x.sin(), "depending on the batch size"),
    "loop": (lambda x: torch.cat([row[None] for row in x.unbind(0)]), "depending on the batch size|operators depend"),
}


@pytest.mark.parametrize(("func", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_graph_values_are_rejected(func: Callable[[Tensor], Tensor], message: str) -> None:
    model = Model(func)
    with pytest.raises(TraceError, match=message):
        trace(model, inputs, model)


# -- fusion ---------------------------------------------------------------------------------------


def test_rewrites_find_norms_and_rotations(harness: RolloutHarness) -> None:
    decoder = decoder_of(harness.case("qwen3"))
    operators: list[list[str]] = []

    def fuse(graph: Any) -> None:
        names = lambda: [getattr(node.target, "__name__", "") for node in graph.nodes]  # noqa: E731
        operators.append(names())
        graph_fusions.fuse(graph)
        operators.append(names())
        waves = [node for node in graph.nodes if getattr(node.target, "__name__", "") in ("cos", "sin")]
        assert [user.target.__name__ for node in waves for user in node.users] == ["unsqueeze"] * 2  # not "mul"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced_decoder, "fuse", fuse)
        decoder._trace_once()
    before, after = operators
    layers, norms = 2, 2 * 4 + 1  # each layer has two norms, and one each for queries and keys
    assert before.count("rsqrt") == after.count("scale_by_rms") == norms
    assert before.count("neg") == after.count("rotate") == 2 * layers
    assert after.count("negate_first_half") == 1
    assert before.count("transpose") - after.count("transpose") == layers  # query and key norms are in between
    assert not {"rsqrt", "pow", "mean", "neg"} & set(after)


def test_the_shorter_forms_are_the_formulas() -> None:
    random = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(3, 5, 1, 8, generator=random, dtype=torch.float64) for _ in range(3))
    unit = x / (x.pow(2).mean(-1, keepdim=True) + 0.25).sqrt()
    torch.testing.assert_close(graph_fusions.scale_by_rms(x.float(), 0.25).double(), unit, rtol=1e-6, atol=1e-6)
    expected = x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin
    actual = graph_fusions.rotate(x, cos, graph_fusions.negate_first_half(sin))
    torch.testing.assert_close(actual, expected)


def test_a_rotation_with_other_halves_is_not_fused() -> None:
    def odd(x: Tensor) -> Tensor:
        return x * 2 + torch.cat((-x[..., 1:], x[..., :1]), dim=-1) * 3

    model = Model(odd)
    graph = trace(model, inputs, model)
    graph_fusions.fuse(graph)
    assert "rotate" not in [getattr(node.target, "__name__", "") for node in graph.nodes]


def test_rows_in_a_few_and_in_many_are_the_same(tmp_path: Path) -> None:
    # The last rows of a call use the original weights, earlier rows use packed copies.
    case = RolloutHarness(TorchRollout, tmp_path).case("qwen2", {"hidden": 128, "intermediate": 320})
    prompts = Ragged.from_rows([torch.arange(3, 9)] * MIN_ROWS)
    many = case.rollout.generate_sequences(prompts, SamplingParams(MIN_STEPS, temperature=0, ignore_eos=True))
    few = case.rollout.generate_sequences(
        prompts.select([0]), SamplingParams(MIN_STEPS, temperature=0, ignore_eos=True)
    )
    assert many.responses.rows()[0].tolist() == few.responses.rows()[0].tolist()
