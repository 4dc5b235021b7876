"""The entropy coefficient with a target."""

import math

import pytest

from camshaft.algorithms import AdaptiveEntropy


def coefficient(value=0.0):
    return AdaptiveEntropy(value, target=0.3, delta=0.01, bounds=(0.0, 0.02))


def test_coefficient_by_hand():
    entropy = coefficient()
    values = []
    for measured in (0.2, 0.1, 0.1, 0.5, 0.2, 0.3, math.nan):
        entropy.update(measured)
        values.append(entropy.value)
    # It rises to the bound, is not applied above the target, and starts again from 0.01; the target itself changes
    # nothing.
    assert values == pytest.approx([0.01, 0.02, 0.02, 0.0, 0.02, 0.02, 0.02])


def test_coefficient_falls_to_its_lower_bound():
    entropy = coefficient(0.015)
    for _ in range(3):
        entropy.update(1.0)
    assert entropy.value == 0
    entropy.update(0.1)
    assert entropy.value == pytest.approx(0.01)


def test_first_update_has_the_initial_coefficient():
    assert coefficient(0.015).value == 0.015


def test_coefficient_resumes_from_a_checkpoint():
    one, other = coefficient(), coefficient()
    for measured in (0.1, 0.1, 0.9):
        one.update(measured)
    other.load_state_dict(one.state_dict())
    assert other.value == one.value == 0
    for entropy in (one, other):
        entropy.update(0.2)
    assert other.value == one.value == pytest.approx(0.02)


def test_a_checkpoint_without_a_state_keeps_the_initial_value():
    entropy = coefficient(0.01)
    entropy.load_state_dict({})
    assert entropy.value == 0.01
