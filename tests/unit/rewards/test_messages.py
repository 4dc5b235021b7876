from camshaft.rewards.messages import Sample


def test_a_sample_survives_pickling():
    sample = Sample("s", "text", {"a": [1, None]}, {})
    assert Sample.unpacked(sample.packed()) == sample
