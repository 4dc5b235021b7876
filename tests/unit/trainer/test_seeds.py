import torch

from camshaft.trainer.mini_batches import VALIDATION, sampling_seeds, shuffle_seed

LARGEST = 2**32 - 1
"""Seeds that the config accepts."""


def test_every_row_of_every_step_has_a_unique_seed() -> None:
    steps = [VALIDATION, 1, 2, 3, 1000, 2**20 - 1]
    seeds = torch.cat([sampling_seeds(seed, step, 5000) for seed in (0, 1, 2, 77) for step in steps])
    assert seeds.dtype == torch.int64
    assert len(seeds.unique()) == len(seeds) == 4 * 6 * 5000


def test_later_rows_of_a_step_continue_the_seed_sequence() -> None:
    both = [sampling_seeds(3, 5, 10), sampling_seeds(3, 5, 6, first=10)]
    assert torch.equal(torch.cat(both), sampling_seeds(3, 5, 16))


def test_seeds_of_adjacent_steps_and_runs_do_not_overlap() -> None:
    rows = 2**24
    last, following = sampling_seeds(1, 7, rows)[-1], sampling_seeds(1, 8, 1)[0]
    assert following == last + 1
    assert sampling_seeds(2, VALIDATION, 1)[0] == sampling_seeds(1, 2**20 - 1, rows)[-1] + 1


def test_seeds_depend_only_on_the_step() -> None:
    first = sampling_seeds(3, 10, 8)
    torch.rand(5)
    assert torch.equal(sampling_seeds(3, 10, 8), first)
    assert torch.equal(sampling_seeds(3, 10, 16)[:8], first)


def test_the_largest_seed_of_the_config_fits() -> None:
    seeds = sampling_seeds(LARGEST, 2**20 - 1, 2**10)
    assert bool((seeds >= 0).all())
    torch.Generator().manual_seed(int(seeds[-1]))
    torch.Generator().manual_seed(shuffle_seed(LARGEST, 2**20 - 1))


def test_mini_batch_order_depends_on_step_and_seed() -> None:
    seeds = {shuffle_seed(seed, step) for seed in (0, 1, 2, LARGEST) for step in range(1, 2000)}
    assert len(seeds) == 4 * 1999
