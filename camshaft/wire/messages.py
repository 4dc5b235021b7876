"""Protobuf messages of the Tinker wire, built from a table of field numbers, names and types.

    request = ForwardBackwardRequest.FromString(body)
    SampleResponse(sequences=[SampledSequence(tokens=ids.tobytes())]).SerializeToString()

The classes are in a descriptor pool of their own, under the package name of this project. The SDK's module of the same
messages can therefore be imported in the same process.
"""

import re
from typing import Any

from camshaft.errors import ConfigError
from camshaft.plugins import install_command

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ModuleNotFoundError as error:
    raise ConfigError(f"the Tinker wire requires protobuf. Run: {install_command('google.protobuf')}") from error

PACKAGE = "camshaft.wire"

ENUMERATIONS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
"""Names of the values of each enumeration, which are numbered from 0."""

MESSAGES: dict[str, tuple[str, ...]] = {
    "ForwardBackwardRequest": (
        "1 model_id string",
        "2 seq_id int32",
        "3 data repeated Datum",
        "4 loss_fn string",
        "5 loss_fn_config map double",
        "6 forward_only bool",
        "7 loss_fn_config_v2 map LossConfigValue",
    ),
    "LossConfigValue": ("1 number oneof(value) double", "2 text oneof(value) string"),
    "Datum": (
        "1 model_input repeated Chunk",
        "2 loss_fn_inputs map Tensor",
        "3 model_input_spans repeated ProvenanceSpan",
        "4 loss_fn_input_spans repeated ProvenanceSpan",
    ),
    "Chunk": (
        "1 encoded_text oneof(chunk) EncodedTextChunk",
        "2 image oneof(chunk) ImageChunk",
        "3 dmel oneof(chunk) DmelChunk",
    ),
    "EncodedTextChunk": ("1 tokens bytes",),
    "ImageChunk": (
        "1 data bytes",
        "2 format string",
        "3 expected_tokens optional int32",
        "4 override_dimensions optional ImageDimensions",
    ),
    "ImageDimensions": ("1 width uint32", "2 height uint32"),
    "DmelChunk": ("1 dmel bytes",),
    "ProvenanceSpan": (
        "1 prompt_tokens oneof(span) PromptProvenanceSpan",
        "2 sampled_tokens oneof(span) SampledProvenanceSpan",
    ),
    "PromptProvenanceSpan": ("1 sequence_id string", "2 offset int64", "3 length int64"),
    "SampledProvenanceSpan": ("1 sequence_id string", "2 offset int64", "3 length int64"),
    "Tensor": (
        "1 dense oneof(encoding) bytes",
        "2 sparse_csr oneof(encoding) SparseCsr",
        "3 dtype DType",
        "4 shape repeated int64",
    ),
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs repeated ArrayRecord",
        "3 metrics map double",
    ),
    "ArrayRecord": ("1 type_tag string", "2 fields map BatchedTensor", "3 num_datums int64"),
    "BatchedTensor": ("1 data bytes", "2 offsets bytes", "3 dtype DType", "4 trailing_shape repeated int64"),
    "SamplingParams": (
        "1 max_tokens optional int32",
        "2 seed optional uint64",
        "3 temperature optional float",
        "4 top_k optional int32",
        "5 top_p optional float",
        "6 stop_strs oneof(stop) StopStrings",
        "7 stop_tokens oneof(stop) StopTokens",
    ),
    "StopStrings": ("1 values repeated string",),
    "StopTokens": ("1 values repeated int32",),
    "SampleResponse": (
        "1 sequences repeated SampledSequence",
        "2 prompt_logprobs optional bytes",
        "3 topk_prompt_logprobs optional TopkLogprobs",
        "4 prompt_cache_hit_tokens int32",
        "5 target_prompt_logprobs optional Tensor",
        "6 prompt_alt_tokens optional PromptAltTokens",
    ),
    "SampledSequence": (
        "1 stop_reason StopReason",
        "2 tokens bytes",
        "3 logprobs optional bytes",
        "4 topk_sampled_logprobs optional TopkLogprobs",
    ),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
    "PromptAltTokens": ("1 tokens Tensor", "2 logprobs Tensor"),
}
"""Fields of each message: number, name, label (optional, repeated, map from a string, or oneof) and type."""

_FIELD = re.compile(r"(\d+) (\w+) (?:(optional|repeated|map|oneof\((\w+)\)) )?(\w+)")
_Field: Any = descriptor_pb2.FieldDescriptorProto


def _add_field(message: Any, number: int, name: str, type_name: str) -> Any:
    """Add a field of a scalar type, an enumeration or a message to the description of a message."""
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if type_name in MESSAGES or type_name in ENUMERATIONS:
        field.type = _Field.TYPE_MESSAGE if type_name in MESSAGES else _Field.TYPE_ENUM
        field.type_name = f".{PACKAGE}.{type_name}"
    else:
        field.type = getattr(_Field, f"TYPE_{type_name.upper()}")
    return field


def _describe_message(file: Any, name: str, rows: tuple[str, ...]) -> None:
    """Add a message to the description of the file."""
    message, optional = file.message_type.add(name=name), []
    for row in rows:
        match = _FIELD.fullmatch(row)
        assert match is not None, row
        number, field_name, label, oneof, type_name = match.groups()
        if label == "map":
            entry = message.nested_type.add(name="".join(map(str.capitalize, field_name.split("_"))) + "Entry")
            entry.options.map_entry = True
            _add_field(entry, 1, "key", "string")
            _add_field(entry, 2, "value", type_name)
            field = message.field.add(name=field_name, number=int(number), type=_Field.TYPE_MESSAGE)
            field.type_name = f".{PACKAGE}.{name}.{entry.name}"
        else:
            field = _add_field(message, int(number), field_name, type_name)
        if label in ("repeated", "map"):
            field.label = _Field.LABEL_REPEATED
        elif label == "optional":
            field.proto3_optional = True
            optional.append(field)
        elif oneof is not None:
            names = [declaration.name for declaration in message.oneof_decl]
            if oneof not in names:
                message.oneof_decl.add(name=oneof)
                names.append(oneof)
            field.oneof_index = names.index(oneof)
    for field in optional:  # protobuf represents each as a group of one field, after the other groups
        message.oneof_decl.add(name=f"_{field.name}")
        field.oneof_index = len(message.oneof_decl) - 1


def _build_classes() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message classes, and the numbers of the values of the enumerations, by name."""
    file: Any = descriptor_pb2.FileDescriptorProto(name="camshaft/wire.proto", package=PACKAGE, syntax="proto3")
    numbers: dict[str, Any] = {}
    for name, values in ENUMERATIONS.items():
        enumeration = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enumeration.value.add(name=value, number=number)
            numbers[value] = number
    for name, rows in MESSAGES.items():
        _describe_message(file, name, rows)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    types = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in MESSAGES}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in types.items()}, numbers


CLASSES, NUMBERS = _build_classes()
ForwardBackwardRequest = CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = CLASSES["ForwardBackwardOutput"]
SampleResponse = CLASSES["SampleResponse"]


def decode(kind: Any, body: bytes) -> Any:
    """Parse a message. Raise ValueError if the bytes are no message of this kind."""
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is no {kind.DESCRIPTOR.name} message: {error}") from error
