import pytest

from camshaft.rewards.wire import Answer, FrameReader, Reply, Sample, pack


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
def test_messages_arrive_whole_however_the_bytes_are_split(size):
    messages = [Reply("ok", 1.0, {}), ["x" * 100], None, Answer([Reply("error", 0.0, {}, "m", "t")], 0.5)]
    data = b"".join(map(pack, messages))
    reader = FrameReader()
    found = [message for i in range(0, len(data), size) for message in reader.feed(data[i : i + size])]
    assert found == messages


def test_a_sample_comes_back_as_it_was():
    sample = Sample("s", "text", {"a": [1, None]}, {})
    assert Sample.unpacked(sample.packed()) == sample
