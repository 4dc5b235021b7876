"""The wire of this package equals that of the SDK, field by field.

make test-tinker
"""

import json
from typing import Any

import pytest
from support.tinker_sdk import run_python

from camshaft.wire import messages, schemas

pytestmark = pytest.mark.tinker

DESCRIBE = """
import json
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.json_format import MessageToDict
from tinker.proto import tinker_public_pb2
content = FileDescriptorProto()
tinker_public_pb2.DESCRIPTOR.CopyToProto(content)
print(json.dumps(MessageToDict(content)))
"""
MODELS = """
import json
from tinker import types
names = ["CreateModelRequest", "LoraConfig", "AdamParams", "SaveWeightsRequest", "LoadWeightsRequest",
         "SaveWeightsForSamplerRequest", "CreateSamplingSessionRequest", "SampleRequest", "SamplingParams",
         "CreateSessionRequest", "OptimStepRequest"]
print(json.dumps({name: list(getattr(types, name).model_fields) for name in names if hasattr(types, name)}))
"""
"""Prints the fields of the SDK's models of JSON bodies."""
SCHEMAS: dict[str, type[Any]] = {
    "CreateModelRequest": schemas.CreateModel,
    "LoraConfig": schemas.LoraSettings,
    "AdamParams": schemas.AdamSettings,
    "SaveWeightsRequest": schemas.SaveWeights,
    "LoadWeightsRequest": schemas.LoadWeights,
    "SaveWeightsForSamplerRequest": schemas.SaveWeightsForSampler,
    "CreateSamplingSessionRequest": schemas.CreateSamplingSession,
    "SampleRequest": schemas.Sample,
    "SamplingParams": schemas.SampleSettings,
    "CreateSessionRequest": schemas.CreateSession,
    "OptimStepRequest": schemas.OptimStep,
}


def facts_of_file(content: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Return every fact about messages, fields and enumerations, with type names without their package."""
    facts: set[tuple[Any, ...]] = set()

    def add(message: dict[str, Any], path: str) -> None:
        groups = [group["name"] for group in message.get("oneofDecl", [])]
        facts.add((path, "message"))
        for field in message.get("field", []):
            type_name = field.get("typeName", "").rpartition(".")[2]
            group = groups[field["oneofIndex"]] if "oneofIndex" in field else ""
            optional = field.get("proto3Optional", False)
            facts.add((path, field["number"], field["name"], field["label"], field["type"], type_name, group, optional))
        for nested in message.get("nestedType", []):
            add(nested, f"{path}.{nested['name']}")

    for message in content["messageType"]:
        add(message, message["name"])
    for enumeration in content["enumType"]:
        facts |= {(enumeration["name"], value["name"], value.get("number", 0)) for value in enumeration["value"]}
    return facts


def test_each_message_equals_that_of_the_sdk() -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.json_format import MessageToDict

    own = FileDescriptorProto()
    messages.ForwardBackwardRequest.DESCRIPTOR.file.CopyToProto(own)
    ours, theirs = facts_of_file(MessageToDict(own)), facts_of_file(json.loads(run_python(DESCRIBE)))
    assert ours - theirs == set(), "in the table, but not in the SDK"
    assert theirs - ours == set(), "in the SDK, but not in the table"
    assert sum(fact[1:] == ("message",) and "." not in fact[0] for fact in ours) == 23


def test_a_field_that_only_one_of_them_has_is_found() -> None:
    content = json.loads(run_python(DESCRIBE))
    changed = json.loads(json.dumps(content))
    changed["messageType"][0]["field"][0]["number"] += 50
    name = changed["messageType"][0]["field"][0]["name"]
    assert {fact[2] for fact in facts_of_file(changed) ^ facts_of_file(content)} == {name}


def test_each_json_body_has_the_fields_of_the_sdk() -> None:
    models: dict[str, list[str]] = json.loads(run_python(MODELS))
    assert len(models) >= 8
    unknown = {
        f"{name}.{field}"
        for name, names in models.items()
        for field in names
        if field not in {*schemas.field_names(SCHEMAS[name]), "type"}
    }
    assert unknown == {"OptimStepRequest.optim_params"}  # which the SDK sends under another name, adam_params
