import socket
import threading

import numpy as np
import pytest
import torch

from camshaft.controller.wire import pack, receive, send, unpack
from camshaft.dataproto import DataProto, Ragged


def through_a_socket(value: object) -> object:
    here, there = socket.socketpair()
    with here, there:
        thread = threading.Thread(target=send, args=(here, pack(value)))
        thread.start()
        received = unpack(receive(there))
        thread.join()
    return received


def test_a_batch_arrives_as_it_was_sent():
    tokens = Ragged.from_rows([[1, 2, 3], [], [4]])
    batch = DataProto.from_dict(
        {"tokens": tokens, "half": torch.ones(3, 2, dtype=torch.bfloat16), "uid": ["a", None, {"b": 1}]}, {"step": 3}
    )
    got = through_a_socket(batch)
    assert isinstance(got, DataProto)
    assert torch.equal(got["tokens"].values, tokens.values)
    assert got["tokens"].lengths.tolist() == [3, 0, 1]
    assert torch.equal(got["half"], batch["half"])
    assert list(got["uid"]) == ["a", None, {"b": 1}]
    assert got.meta_info == {"step": 3}


def test_more_than_a_socket_holds_goes_through():
    values = np.random.default_rng(0).standard_normal(3_000_000)
    got = through_a_socket({"values": values, "none": np.empty(0)})
    assert isinstance(got, dict)
    assert np.array_equal(got["values"], values)
    assert got["none"].size == 0


def test_what_arrives_may_be_written_to():
    got = through_a_socket([np.zeros(2), DataProto.from_dict({"x": torch.zeros(2)})])
    assert isinstance(got, list)
    got[0][0] = 1.0
    got[1]["x"][0] = 1.0
    assert got[0].tolist() == [1.0, 0.0]


def test_buffers_are_not_copied_into_the_message():
    values = np.zeros(1000)
    _, buffer = pack(values)
    values[0] = 5.0
    assert np.frombuffer(buffer)[0] == 5.0


def test_a_slice_is_sent_without_the_rest():
    batch = DataProto.from_dict({"x": torch.zeros(1000, 100)}).chunk(10)[3]
    assert sum(len(frame) for frame in pack(batch)) < 1000 * 100 * 4 / 10 + 2000


def test_the_other_side_going_away_is_an_error_not_a_wait():
    here, there = socket.socketpair()
    with there:
        here.sendall(b"\0\0\0")
        here.close()
        with pytest.raises(ConnectionError):
            receive(there)
