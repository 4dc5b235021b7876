import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.config.engine import EngineConfig, EngineModel
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.micro_batches import plan_micro_batches
from camshaft.engine.prefix_sharing import Family, families, pack
from camshaft.engine.single import SingleDeviceEngine
from camshaft.models.tiny import make_tiny_model


def batch(*rows: tuple[str, str]) -> tuple[Ragged, Ragged]:
    """Each row a prompt and a response, a letter for each token."""
    ids = Ragged.from_rows([[ord(letter) - 90 for letter in prompt + response] for prompt, response in rows])
    mask = Ragged.from_rows([[0] * len(prompt) + [1] * len(response) for prompt, response in rows])
    return ids, mask.map(torch.Tensor.bool)


def test_rows_with_one_prompt_are_a_family_wherever_they_stand() -> None:
    found = families(*batch(("abc", "x"), ("ab", "cx"), ("abc", "yz"), ("abd", "x"), ("ab", "d")))
    assert found == [Family((0, 2), 3), Family((1, 4), 2), Family((3,), 0)]


def test_a_row_without_a_counted_token_or_without_a_prompt_is_alone() -> None:
    ids, mask = batch(("abc", "x"), ("abc", "y"), ("", "abc"), ("", "abc"))
    mask.values[mask.row_ids() == 1] = False
    assert families(ids, mask) == [Family((row,), 0) for row in range(4)]


def test_the_prompt_is_packed_once_and_every_counted_token_is_found_again() -> None:
    ids, mask = batch(("abc", "xy"), ("d", "zz"), ("abc", "w"))
    packed = pack(ids, mask.values.nonzero()[:, 0], families(ids, mask))
    letters = "".join(chr(int(token) + 90) for token in packed.tokens)
    assert letters == "abc" + "xy" + "w" + "dzz"
    assert (packed.lengths, packed.parents) == ([3, 2, 1, 3], [None, 0, 0, None])
    assert "".join(letters[place] for place in packed.at) == "xyzzw"


def test_rows_that_share_nothing_are_packed_as_they_are() -> None:
    ids, mask = batch(("abc", "xy"), ("d", "zz"))
    packed = pack(ids, mask.values.nonzero()[:, 0], families(ids, mask))
    assert packed.tokens is ids.values
    assert (packed.lengths, packed.parents) == ([5, 3], None)


@given(st.data())
def test_a_plan_keeps_families_together_as_far_as_the_budget_holds_them(data: st.DataObject) -> None:
    shared = data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=5))
    together, lengths = [], []
    for prompt in shared:
        rows = data.draw(st.lists(st.integers(1, 10), min_size=2, max_size=5))
        together.append(Family(tuple(range(len(lengths), len(lengths) + len(rows))), prompt))
        lengths += [prompt + response for response in rows]
    budget = data.draw(st.integers(20, 60))
    plan = plan_micro_batches(torch.tensor(lengths), None, budget, together=together)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        within = [[row for row in rows if row in family.rows] for family in together]
        computed = [
            family.shared + sum(lengths[row] - family.shared for row in part)
            for family, part in zip(together, within, strict=True)
            if part
        ]
        assert sum(computed) <= budget
    for family in together:
        whole = family.shared + sum(lengths[row] - family.shared for row in family.rows)
        if whole <= budget:
            assert sum(any(row in family.rows for row in rows) for rows in plan) == 1


@pytest.mark.parametrize(("share", "computed"), [(True, 7), (False, 12)])
def test_the_model_is_given_the_prompt_once_unless_that_is_turned_off(tmp_path, share: bool, computed: int) -> None:
    path = str(make_tiny_model(tmp_path / "model", hidden=16))
    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=path, use_prefix_grouper=share)))
    engine.init_model()
    seen: list[int] = []
    engine.module.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    ids, mask = batch(("abcde", "x"), ("abcde", "y"))
    with engine.eval_mode():
        engine.infer_batch(DataProto.from_dict({"input_ids": ids, "loss_mask": mask}))
    assert seen == [computed]


@pytest.mark.parametrize(
    "changes",
    [{"attention_dropout": 0.1}, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}],
    ids=["dropout", "window"],
)
def test_models_in_which_rows_do_not_share_a_prompt_compute_it_for_each(tmp_path, changes) -> None:
    path = str(make_tiny_model(tmp_path / "model", hidden=16, **changes))
    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=path)))
    engine.init_model()
    assert not engine.module.continues
    seen: list[int] = []
    engine.module.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    ids, mask = batch(("abcde", "x"), ("abcde", "y"))
    with engine.eval_mode():
        engine.infer_batch(DataProto.from_dict({"input_ids": ids, "loss_mask": mask}))
    assert seen == [12]
