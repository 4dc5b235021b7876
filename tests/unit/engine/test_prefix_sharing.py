from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.emulated_cuda import DEVICE, emulated_cuda

from camshaft.config.engine import EngineConfig, EngineModel
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.micro_batches import plan_micro_batches
from camshaft.engine.prefix_sharing import PrefixGroup, pack_rows, prefix_groups
from camshaft.engine.single import SingleDeviceEngine
from camshaft.models.packing import Packing
from camshaft.models.tiny import make_tiny_model


def batch(*rows: tuple[str, str]) -> tuple[Ragged, Ragged]:
    """Build rows of a prompt and a response; each letter is a token."""
    ids = Ragged.from_rows([[ord(letter) - 90 for letter in prompt + response] for prompt, response in rows])
    mask = Ragged.from_rows([[0] * len(prompt) + [1] * len(response) for prompt, response in rows])
    return ids, mask.map(torch.Tensor.bool)


def test_rows_with_equal_prompts_form_a_group_in_any_order() -> None:
    groups = prefix_groups(*batch(("abc", "x"), ("ab", "cx"), ("abc", "yz"), ("abd", "x"), ("ab", "d")))
    assert groups == [PrefixGroup((0, 2), 3), PrefixGroup((1, 4), 2), PrefixGroup((3,), 0)]


def test_a_row_without_counted_tokens_or_prompt_is_not_shared() -> None:
    ids, mask = batch(("abc", "x"), ("abc", "y"), ("", "abc"), ("", "abc"))
    mask.values[mask.row_ids() == 1] = False
    assert prefix_groups(ids, mask) == [PrefixGroup((row,), 0) for row in range(4)]


def test_a_shared_prompt_is_packed_once() -> None:
    ids, mask = batch(("abc", "xy"), ("d", "zz"), ("abc", "w"))
    packed = pack_rows(ids, mask.values.nonzero()[:, 0], prefix_groups(ids, mask))
    letters = "".join(chr(int(token) + 90) for token in packed.tokens)
    assert letters == "abc" + "xy" + "w" + "dzz"
    assert (packed.packing.lengths, packed.packing.prefix_of) == ((3, 2, 1, 3), (None, 0, 0, None))
    assert "".join(letters[offset] for offset in packed.at) == "xyzzw"
    assert torch.equal(packed.reorder(ids.values), packed.tokens)


def test_positions_and_previous_tokens_of_a_continuation_follow_its_prefix() -> None:
    packing = Packing([3, 2, 1, 3], prefix_of=[None, 0, 0, None])
    assert packing.position_ids().tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2]
    assert packing.previous(torch.tensor([1, 3, 4, 5, 7])).tolist() == [0, 2, 3, 2, 6]
    assert packing.row_starts.tolist() == [0, 6]
    assert packing.longest_context == 5


def test_rows_without_a_shared_prompt_keep_their_order() -> None:
    ids, mask = batch(("abc", "xy"), ("d", "zz"))
    packed = pack_rows(ids, mask.values.nonzero()[:, 0], prefix_groups(ids, mask))
    assert packed.tokens is ids.values
    assert (packed.packing.lengths, packed.packing.prefix_of) == ((5, 3), None)


def test_micro_batches_of_a_fixed_size_keep_rows_with_a_common_prompt_together() -> None:
    groups, lengths = [PrefixGroup((0, 3, 4), 2), PrefixGroup((1,), 0), PrefixGroup((2, 5), 4)], torch.arange(5, 11)
    assert plan_micro_batches(lengths, 2, None, prefix_groups=groups) == [[0, 3], [1, 4], [2, 5]]
    assert plan_micro_batches(lengths, 3, None, prefix_groups=groups) == [[0, 3, 4], [1, 2, 5]]
    assert plan_micro_batches(lengths, 2, None) == [[0, 1], [2, 3], [4, 5]]


@given(st.data())
def test_a_plan_keeps_prefix_groups_within_the_budget_together(data: st.DataObject) -> None:
    groups, lengths = [], []
    for prompt in data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=5)):
        responses = data.draw(st.lists(st.integers(1, 10), min_size=2, max_size=5))
        groups.append(PrefixGroup(tuple(range(len(lengths), len(lengths) + len(responses))), prompt))
        lengths += [prompt + response for response in responses]
    budget = data.draw(st.integers(20, 60))
    plan = plan_micro_batches(torch.tensor(lengths), None, budget, prefix_groups=groups)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        members = [[row for row in rows if row in group.rows] for group in groups]
        computed = [
            group.shared + sum(lengths[row] - group.shared for row in part)
            for group, part in zip(groups, members, strict=True)
            if part
        ]
        assert sum(computed) <= budget
    for group in groups:
        if group.shared + sum(lengths[row] - group.shared for row in group.rows) <= budget:
            assert sum(any(row in group.rows for row in rows) for rows in plan) == 1


@pytest.mark.parametrize(("share", "computed"), [(True, 7), (False, 12)])
def test_the_model_computes_a_prompt_once_unless_disabled(tmp_path, share: bool, computed: int) -> None:
    path = str(make_tiny_model(tmp_path / "model", hidden=16))
    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=path, use_prefix_grouper=share)))
    engine.init_model()
    counts: list[int] = []
    engine.module.register_forward_pre_hook(lambda module, args: counts.append(len(args[0])))
    ids, mask = batch(("abcde", "x"), ("abcde", "y"))
    with engine.eval_mode():
        engine.infer_batch(DataProto.from_dict({"input_ids": ids, "loss_mask": mask}))
    assert counts == [computed]


@pytest.mark.parametrize(("value_width", "computed"), [(8, 12), (16, 7)])
def test_latent_attention_shares_prompts_if_keys_are_as_wide_as_values(
    tmp_path, value_width: int, computed: int
) -> None:
    sizes: dict[str, Any] = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "kv_heads": 4,
    }
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "n_group": 1, "head_dim": 8}
    path = str(make_tiny_model(tmp_path / "model", "deepseek_v3", hidden=16, v_head_dim=value_width, **sizes))
    ids, mask = batch(("abcde", "x"), ("abcde", "y"))
    data, log_probs = DataProto.from_dict({"input_ids": ids, "loss_mask": mask}), []
    for share in (True, False):
        model = EngineModel(path=path, use_prefix_grouper=share)
        engine: Any = SingleDeviceEngine(EngineConfig(model=model, dtype="float64"))
        engine.init_model()
        counts: list[int] = []
        engine.module.register_forward_pre_hook(lambda module, args, counts=counts: counts.append(len(args[0])))
        with engine.eval_mode():
            log_probs.append(engine.infer_batch(data)["log_probs"].values)
        assert counts == [computed if share else 12]
    torch.testing.assert_close(log_probs[0], log_probs[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "computed"), [("bfloat16", 7), ("float32", 12)])
def test_a_gpu_computes_a_prompt_once_in_half_precision(tmp_path, dtype: str, computed: int) -> None:
    path = str(make_tiny_model(tmp_path / "model", hidden=16))
    ids, mask = batch(("abcde", "x"), ("abcde", "y"))
    data, log_probs = DataProto.from_dict({"input_ids": ids, "loss_mask": mask}), []
    with emulated_cuda():
        for share in (True, False):
            model = EngineModel(path=path, use_prefix_grouper=share)
            options = {"mixed_precision": {"param_dtype": dtype}}
            engine: Any = SingleDeviceEngine(EngineConfig(model=model, device=DEVICE, options=options))
            engine.init_model()
            counts: list[int] = []
            engine.module.register_forward_pre_hook(lambda module, args, counts=counts: counts.append(len(args[0])))
            with engine.eval_mode():
                log_probs.append(engine.infer_batch(data)["log_probs"].values.cpu())
            assert counts == [computed if share else 12]
    torch.testing.assert_close(log_probs[0], log_probs[1], rtol=0, atol=0.02 if dtype == "bfloat16" else 0)


@pytest.mark.parametrize(("device", "computed"), [("cpu", 81), (DEVICE, 82)])
def test_a_gpu_shares_no_prompt_that_saves_few_tokens(tmp_path, device: str, computed: int) -> None:
    path = str(make_tiny_model(tmp_path / "model", hidden=16))
    rows = Ragged.from_rows([[7, *range(8, 8 + 40)], [7, *range(9, 9 + 40)]])
    mask = rows.map(lambda ids: ids != 7)
    counts: list[int] = []
    with emulated_cuda():
        options = {"mixed_precision": {"param_dtype": "bfloat16"}}
        engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=path), device=device, options=options))
        engine.init_model()
        engine.module.register_forward_pre_hook(lambda module, args: counts.append(len(args[0])))
        with engine.eval_mode():
            engine.infer_batch(DataProto.from_dict({"input_ids": rows, "loss_mask": mask}))
    assert counts == [computed]


@pytest.mark.parametrize(
    "changes",
    [{"attention_dropout": 0.1}, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}],
    ids=["dropout", "window"],
)
def test_models_without_prefix_sharing_compute_each_prompt(tmp_path, changes) -> None:
    path = str(make_tiny_model(tmp_path / "model", hidden=16, **changes))
    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=path)))
    engine.init_model()
    assert not engine.module.supports_prefix_sharing
    counts: list[int] = []
    engine.module.register_forward_pre_hook(lambda module, args: counts.append(len(args[0])))
    ids, mask = batch(("abcde", "x"), ("abcde", "y"))
    with engine.eval_mode():
        engine.infer_batch(DataProto.from_dict({"input_ids": ids, "loss_mask": mask}))
    assert counts == [12]
