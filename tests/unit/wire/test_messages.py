"""The protobuf messages of the table, beside bytes that were encoded by hand."""

import struct
import subprocess
import sys

import pytest
from google.protobuf import descriptor_pool

from camshaft.wire import messages


def varint(value: int) -> bytes:
    out = b""
    while value >= 128:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    """Encode a field with a length, such as a string or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def number_field(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def test_a_request_is_read_from_the_bytes_of_the_format() -> None:
    tokens = struct.pack("<3i", 5, 6, 7)
    tensor = field(1, struct.pack("<3q", 6, 7, 8)) + number_field(3, 2) + field(4, varint(3))
    chunk = field(1, field(1, tokens))
    datum = field(1, chunk) + field(2, field(1, b"target_tokens") + field(2, tensor))
    option = field(1, b"beta") + field(2, varint(1 << 3 | 1) + struct.pack("<d", 0.05))
    body = field(1, b"s:train:0") + number_field(2, 300) + field(3, datum) + field(4, b"dro") + number_field(6, 1)
    request = messages.decode(messages.ForwardBackwardRequest, body + field(7, option))
    assert (request.model_id, request.seq_id, request.loss_fn, request.forward_only) == ("s:train:0", 300, "dro", True)
    assert request.data[0].model_input[0].WhichOneof("chunk") == "encoded_text"
    assert request.data[0].model_input[0].encoded_text.tokens == tokens
    targets = request.data[0].loss_fn_inputs["target_tokens"]
    assert (targets.dtype, list(targets.shape)) == (messages.NUMBERS["DTYPE_INT64"], [3])
    assert request.loss_fn_config_v2["beta"].number == 0.05


def test_an_answer_is_written_in_the_bytes_of_the_format() -> None:
    response = messages.SampleResponse()
    response.sequences.add(stop_reason=1, tokens=b"\1\0\0\0", logprobs=b"\0\0\0\0")
    expected = number_field(1, 1) + field(2, b"\1\0\0\0") + field(3, b"\0\0\0\0")
    assert response.SerializeToString() == field(1, expected)


def test_absent_optional_fields_differ_from_empty_ones() -> None:
    assert not messages.SampleResponse().HasField("prompt_logprobs")
    assert messages.SampleResponse(prompt_logprobs=b"").HasField("prompt_logprobs")


def test_fields_of_a_newer_sdk_survive_and_are_part_of_the_digest() -> None:
    body = field(1, b"m") + field(99, b"new")
    request = messages.decode(messages.ForwardBackwardRequest, body)
    assert request.SerializeToString(deterministic=True) == body


@pytest.mark.parametrize("body", [b"\xff", field(3, b"\xff"), b"\x0a\x05ab"])
def test_bytes_that_are_no_message_are_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match="no ForwardBackwardRequest message"):
        messages.decode(messages.ForwardBackwardRequest, body)


def test_the_classes_are_not_in_the_pool_that_the_sdk_uses() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName(f"{messages.PACKAGE}.Datum")


def test_without_protobuf_the_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["google.protobuf"] = None
from camshaft.errors import ConfigError
try:
    import camshaft.wire.messages
except ConfigError as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "the Tinker wire requires protobuf. Run: pip install" in process.stdout
    assert "[serve]" in process.stdout
