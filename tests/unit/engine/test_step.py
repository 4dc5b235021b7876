from typing import Any

import pytest
import torch

from camshaft.config.engine import EngineCapabilities, EngineConfig, EngineModel
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.base import LossFn, PostprocessFn, PreprocessFn
from camshaft.engine.context import StepContext, call_context
from camshaft.engine.micro_batches import as_batch
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import BatchError, EngineError


def batch_of(*lengths: int, mask: list[int] | None = None) -> DataProto:
    ids = Ragged(torch.arange(sum(lengths)), torch.tensor(lengths))
    columns: dict[str, Any] = {"input_ids": ids}
    if mask is not None:
        columns["loss_mask"] = ids.like(torch.tensor(mask).bool())
    return DataProto.from_dict(columns)


class LinearModel(torch.nn.Module):
    """A model of one weight, w = 2: the log-prob of a token is w times its id."""

    supports_prefix_sharing, sequence, routers, hidden_size, vocabulary_size = False, None, None, 32, 100
    pads_rows = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor, packing: Any, at: Any, *_: Any) -> dict[str, torch.Tensor]:
        return {"log_probs": self.weight * tokens[at.tensor]}


class LinearEngine(SingleDeviceEngine):
    """Runs `LinearModel`, one row per micro-batch."""

    def build_model(self) -> Any:
        return LinearModel()

    def run(
        self,
        batch: Any,
        ctx: StepContext | None = None,
        loss_fn: LossFn | None = None,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> tuple[Any, ...]:
        if loss_fn is not None:
            self.set_loss_fn(loss_fn)
        return self.forward_backward_step(batch, ctx, loss_fn is None, preprocess_fn, postprocess_fn)


def linear(engine_class: type[LinearEngine] = LinearEngine) -> LinearEngine:
    model = EngineModel(path="unused")
    engine = engine_class(EngineConfig(model=model, device="cpu", micro_batch_size=1, infer_micro_batch_size=1))
    engine.init_model()
    return engine


def mean_log_prob(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[torch.Tensor, StepContext]:
    loss = predictions["log_probs"].values.sum() / ctx["num_tokens"]
    ctx["metrics"] = {"mean": loss.detach()}
    return loss, ctx


def test_without_a_loss_mask_all_tokens_but_the_first_count() -> None:
    assert as_batch(batch_of(3, 1, 2))["loss_mask"].values.tolist() == [False, True, True, False, False, True]


def test_a_loss_on_the_first_token_is_rejected() -> None:
    with pytest.raises(BatchError, match="first token"):
        as_batch(batch_of(2, 2, mask=[0, 1, 1, 1]))


def test_a_padded_mapping_without_attention_mask_is_rejected() -> None:
    with pytest.raises(BatchError, match="attention_mask"):
        as_batch({"input_ids": torch.zeros(2, 3)})


def test_a_padded_mapping_is_unpadded_with_all_its_grids() -> None:
    grids = {
        "input_ids": torch.tensor([[0, 7, 8], [4, 5, 6]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "advantages": torch.tensor([[9.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        "reward": torch.tensor([1.0, 2.0]),
    }
    batch = as_batch(grids)
    assert [row.tolist() for row in batch["input_ids"].rows()] == [[7, 8], [4, 5, 6]]
    assert batch["advantages"].values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert batch["reward"].tolist() == [1.0, 2.0]


def test_loss_and_metrics_cover_the_mini_batch() -> None:
    # ids 0..5 in rows of 3, 1, 2; counted tokens: 1, 2, 5. Mean log-prob: 2 * (1 + 2 + 5) / 3 = 16 / 3.
    predictions, loss, ctx = linear().run(batch_of(3, 1, 2), None, mean_log_prob)
    assert float(loss) == pytest.approx(16 / 3)
    assert float(ctx["metrics"]["mean"]) == pytest.approx(16 / 3)
    assert (ctx["num_tokens"], ctx["num_sequences"]) == (3.0, 2.0)
    assert predictions["log_probs"].values.tolist() == [0.0, 2.0, 4.0, 0.0, 0.0, 10.0]
    assert not predictions["log_probs"].values.requires_grad


def test_counts_are_summed_over_ranks_before_the_loss_sees_them() -> None:
    # Another rank has the same rows: twice the tokens, so this rank's share of the loss is half.
    class OfTwo(LinearEngine):
        def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
            return 2 * tensor

    _, loss, ctx = linear(OfTwo).run(batch_of(3, 1, 2), None, mean_log_prob)
    assert ctx["num_tokens"] == 6.0
    assert float(loss) == pytest.approx(16 / 3)


def test_a_batch_without_counted_tokens_has_zero_loss() -> None:
    _, loss, ctx = linear().run(batch_of(1, 1), None, mean_log_prob)
    assert float(loss) == 0.0
    assert ctx["num_tokens"] == 1.0


def test_a_rank_with_few_rows_runs_empty_micro_batches() -> None:
    ran: list[int] = []

    def watch(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        ran.append(len(data))
        return data, ctx

    alone, loss, ctx = linear().run(batch_of(3, 1, 2), None, mean_log_prob)

    class BesideSeven(LinearEngine):
        def max_over_ranks(self, count: int) -> int:
            return 7

    predictions, same, again = linear(BesideSeven).run(batch_of(3, 1, 2), None, mean_log_prob, preprocess_fn=watch)
    assert len(ran) == 7
    assert all(ran)
    assert float(same) == float(loss)
    assert float(again["metrics"]["mean"]) == float(ctx["metrics"]["mean"])
    assert torch.equal(predictions["log_probs"].values, alone["log_probs"].values)


def test_postprocess_must_return_a_mapping() -> None:
    with pytest.raises(EngineError, match="return a mapping"):
        linear().run(batch_of(3, 2), postprocess_fn=lambda outputs, ctx: ([1, 2], ctx))


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.zeros(2), "a", ["a", "b"], {"a": 1}])
def test_a_prediction_without_a_value_per_row_is_rejected(value: Any) -> None:
    with pytest.raises(EngineError, match=r"'mean' as a .* one entry for each of 1 rows"):
        linear().run(batch_of(3, 2), postprocess_fn=lambda outputs, ctx: ({"mean": value}, ctx))


def test_predictions_have_the_same_names_in_all_micro_batches() -> None:
    calls: list[int] = []

    def more_each_time(outputs: Any, ctx: StepContext) -> tuple[dict[str, Any], StepContext]:
        calls.append(1)
        return {f"row {number}": [0] for number in range(len(calls))}, ctx

    message = r"returned \['row 0', 'row 1'\] for a micro-batch and \['row 0'\] for the first"
    with pytest.raises(EngineError, match=message):
        linear().run(batch_of(3, 2), postprocess_fn=more_each_time)


@pytest.mark.parametrize("name", ["loss", "mean"])
def test_losses_and_metrics_are_tensors(name: str) -> None:
    def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Any, StepContext]:
        loss, ctx = mean_log_prob(data, predictions, ctx)
        mean: Any = 0.5 if name == "mean" else loss.detach()
        ctx["metrics"] = {"mean": mean}
        return 0.5 if name == "loss" else loss, ctx

    with pytest.raises(EngineError, match=f"the loss function returned '{name}' as a float; return a scalar tensor"):
        linear().run(batch_of(3, 2), None, loss_fn)


def log_prob_sum(predictions: Any) -> torch.Tensor:
    return predictions["log_probs"].values.sum()


LOSSES: dict[str, tuple[LossFn, str]] = {
    "nothing": (lambda d, p, ctx: None, "returned NoneType; return two values, its result and ctx"),
    "the loss alone": (lambda d, p, ctx: log_prob_sum(p), "returned Tensor; return two values"),
    "no context": (lambda d, p, ctx: (log_prob_sum(p), None), "returned Tensor and NoneType; return two values"),
    "a vector": (lambda d, p, ctx: (p["log_probs"].values, ctx), r"'loss' as a Tensor of shape \(3,\)"),
    "a constant": (lambda d, p, ctx: (torch.tensor(1.0), ctx), "a loss without a gradient"),
    "a metric with two values": (
        lambda d, p, ctx: (log_prob_sum(p), {**ctx, "metrics": {"m": torch.ones(2)}}),
        r"'m' as a Tensor of shape \(2,\)",
    ),
    "a list of metrics": (lambda d, p, ctx: (log_prob_sum(p), {**ctx, "metrics": [1]}), "to a list; set a dict"),
}  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize("returned", LOSSES)
def test_a_loss_function_that_returns_anything_else_is_named(returned: str) -> None:
    loss_fn, message = LOSSES[returned]
    with pytest.raises(EngineError, match=f"the loss function .*{message}"):
        linear().run(batch_of(3, 2), None, loss_fn)


def test_a_loss_of_one_element_is_a_scalar() -> None:
    """A metric with the shape (1,) may be beside one with the shape ()."""

    def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[torch.Tensor, StepContext]:
        loss, ctx = mean_log_prob(data, predictions, ctx)
        ctx["metrics"]["reshaped"] = loss.detach().reshape(1)
        return loss.reshape(1), ctx

    _, loss, ctx = linear().run(batch_of(3, 1, 2), None, loss_fn)
    assert float(loss) == pytest.approx(16 / 3)
    assert float(ctx["metrics"]["reshaped"]) == float(ctx["metrics"]["mean"])


@pytest.mark.parametrize("hook", ["preprocess_fn", "postprocess_fn"])
def test_a_hook_that_returns_nothing_is_named(hook: str) -> None:
    hooks: dict[str, Any] = {hook: lambda data, ctx: None}
    with pytest.raises(EngineError, match=f"{hook} returned NoneType; return two values"):
        linear().run(batch_of(3, 2), **hooks)
    with pytest.raises(EngineError, match="preprocess_fn returned NoneType"):
        linear().run({"texts": ["a"]}, preprocess_fn=lambda data, ctx: None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("token", [100, -1])
def test_a_token_id_that_the_model_lacks_is_named_with_its_row(token: int) -> None:
    batch = DataProto.from_dict({"input_ids": Ragged.from_rows([[1, 99], [2], [3, token]])})
    with pytest.raises(BatchError, match=f"row 2 of input_ids contains the token id {token}, .* has 100 rows"):
        linear().run(batch)


def test_token_ids_are_integers() -> None:
    with pytest.raises(BatchError, match=r"dtype torch\.float32; token ids must be int64"):
        linear().run(DataProto.from_dict({"input_ids": Ragged.from_rows([[1.0, 2.0]])}))


@pytest.mark.parametrize("device", ["meta", "gpu7", "hpu"])
def test_a_device_that_is_not_there_moves_nothing(device: str) -> None:
    engine = linear()
    with pytest.raises(EngineError, match=f"device={device}.* is not"):
        engine.to(device)
    (weight,) = engine.module.parameters()
    assert (weight.device.type, float(weight.detach())) == ("cpu", 2.0)


def test_a_dict_is_rejected_as_a_config() -> None:
    with pytest.raises(EngineError, match="config is a dict; pass an EngineConfig"):
        LinearEngine({"model": {"path": "unused"}})  # pyright: ignore[reportArgumentType]


def test_a_tensor_is_rejected_as_a_batch() -> None:
    with pytest.raises(BatchError, match=r"a tensor of shape \(2, 3\); expected a DataProto with .*'input_ids'"):
        linear().run(torch.zeros(2, 3))


@pytest.mark.parametrize(
    "key", ["output", "temprature", "num_token", "metric", "num_tokesn", "rotuing", "temperaturre"]
)
def test_a_misspelt_control_key_is_rejected_with_the_nearest_name(key: str) -> None:
    with pytest.raises(EngineError, match=rf"'{key}'\] is not a control key; did you mean '{key[:2]}"):
        call_context({key: 1}, "causal_lm", EngineCapabilities())


def test_other_keys_of_a_context_are_kept() -> None:
    keys = {"seen": 3, "temp": 1, "tokens": [2], 7: "a", "my_outputs": 1, "inputs": 2, "sequences": 3, "routings_": 4}
    assert keys.items() <= call_context(keys, "causal_lm", EngineCapabilities()).items()


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_rejected(bad: float) -> None:
    with pytest.raises(EngineError, match="temperature"):
        call_context({"temperature": bad}, "causal_lm", EngineCapabilities())


def test_a_returned_context_can_be_reused() -> None:
    engine = linear()
    _, _, ctx = engine.run(batch_of(3, 2), None, mean_log_prob)
    _, _, again = engine.run(batch_of(2, 2), ctx, mean_log_prob)
    assert again["num_tokens"] == 2.0
