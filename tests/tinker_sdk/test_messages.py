"""The wire of this package equals that of the SDK, field by field.

make test-tinker
make test-newest-sdk      of the newest SDK
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.tinker_clients import running_server
from support.tinker_sdk import PYTHON, run_python

from camshaft.roles.served import ServedWorker
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
import inspect, json
from pydantic import BaseModel
from tinker import types
classes = {name: cls for name, cls in vars(types).items() if inspect.isclass(cls) and issubclass(cls, BaseModel)}
print(json.dumps({name: sorted(cls.model_fields) for name, cls in classes.items()}))
"""
"""Prints the fields of the SDK's models of JSON bodies."""
SCHEMAS: dict[str, type[Any]] = {
    "CreateModelRequest": schemas.CreateModel,
    "LoraConfig": schemas.LoraSettings,
    "AdamParams": schemas.AdamSettings,
    "AdamOptimizerConfig": schemas.OptimizerSettings,
    "SaveWeightsRequest": schemas.SaveWeights,
    "SaveWeightsExternalRequest": schemas.SaveWeightsExternal,
    "LoadWeightsRequest": schemas.LoadWeights,
    "SaveWeightsForSamplerRequest": schemas.SaveWeightsForSampler,
    "CreateSamplingSessionRequest": schemas.CreateSamplingSession,
    "SampleRequest": schemas.Sample,
    "SamplingParams": schemas.SampleSettings,
    "CreateSessionRequest": schemas.CreateSession,
    "OptimStepRequest": schemas.OptimStep,
    "SessionHeartbeatRequest": schemas.OfSession,
    "GetInfoRequest": schemas.OfModel,
    "FutureRetrieveRequest": schemas.RetrieveFuture,
    "ClientSessionFinished": schemas.FinishSession,
}
"""Bodies that the server reads."""
OTHER_REQUESTS = {
    "ClientConfigRequest",
    "CopyWeightsRequest",
    "CreateCustomLossRequest",
    "FuturesRetrieveRequest",
    "GetBillingUsageRequest",
    "GetCurrentCheckpointStorageUsageRequest",
    "JoinSamplingSessionRequest",
    "SessionSearchRequest",
    "TelemetrySendRequest",
    "UnloadModelRequest",
}
"""Bodies that it does not read, because it does not serve their routes, or needs nothing in them."""
DEFAULT_FLAGS = {
    "billing_exception_max_pause_duration_sec",
    "credential_default_source",
    "fwdbwd_dispatch_bytes_semaphore_size",
    "inflight_response_bytes_semaphore_size",
    "sample_dispatch_bytes_semaphore_size",
    "sample_enable_stuck_detection",
    "sample_no_retries",
    "use_pyqwest_transport",
}
"""Flags that it leaves at the default of the SDK."""
DOCTOR = """
import pathlib, re, sys
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from tinker.proto import tinker_public_pb2
content = FileDescriptorProto()
tinker_public_pb2.DESCRIPTOR.CopyToProto(content)
message = next(message for message in content.message_type if message.name == "SampleResponse")
message.field.add(name="draft_tokens", number=99, type=FieldDescriptorProto.TYPE_BYTES, label=1)
module = pathlib.Path(sys.argv[1], "proto", "tinker_public_pb2.py")
text = re.sub(r"AddSerializedFile\\(b'.*'\\)", lambda _: f"AddSerializedFile({content.SerializeToString()!r})",
              module.read_text())
module.write_text(text)
models = pathlib.Path(sys.argv[1], "types", "__init__.py")
models.write_text(models.read_text() + "class AdamParams(AdamParams):\\n    momentum: float = 0.0\\n")
"""
"""Adds a field to a message and one to a JSON body of a copy of the SDK."""
NEWER = "see docs/serve.md#newer-sdks"


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
    assert ours - theirs == set(), f"in camshaft/wire, but not in the SDK: {names_of(ours - theirs)}; {NEWER}"
    assert theirs - ours == set(), f"in the SDK, but not in camshaft/wire: {names_of(theirs - ours)}; {NEWER}"
    assert sum(fact[1:] == ("message",) and "." not in fact[0] for fact in ours) == 23


def names_of(facts: Iterable[tuple[Any, ...]]) -> str:
    """Return the names of messages, fields and values of enumerations."""
    return ", ".join(sorted(f"{fact[0]}.{fact[1] if len(fact) == 3 else fact[2]}" for fact in facts if len(fact) > 2))


def test_each_json_body_has_the_fields_of_the_sdk() -> None:
    models: dict[str, list[str]] = json.loads(run_python(MODELS))
    assert models.keys() >= SCHEMAS.keys(), NEWER
    requests = {name for name in models if name.endswith("Request")} - SCHEMAS.keys()
    assert requests == OTHER_REQUESTS, f"new or removed requests: {requests ^ OTHER_REQUESTS}; {NEWER}"
    unknown = {
        f"{name}.{field}"
        for name, schema in SCHEMAS.items()
        for field in models[name]
        if field not in {*schemas.field_names(schema), "type"}
    }
    unknown -= {"OptimStepRequest.optim_params"}  # which the SDK sends under another name, adam_params
    assert unknown == set(), f"in the SDK, but not in camshaft/wire: {', '.join(sorted(unknown))}; {NEWER}"


def test_each_flag_of_the_sdk_is_known(tmp_path: Path) -> None:
    flags = set(json.loads(run_python(MODELS))["ClientConfigResponse"])
    with running_server(tmp_path, worker=ServedWorker) as server:
        answered = server.client().post("client/config", sdk_version="0.38.0").keys()
    assert flags - answered == DEFAULT_FLAGS, f"new or removed flags: {(flags - answered) ^ DEFAULT_FLAGS}; {NEWER}"


def test_fields_of_a_newer_sdk_are_named(tmp_path: Path) -> None:
    package = run_python("import tinker; print(tinker.__path__[0])").strip()
    shutil.copytree(package, tmp_path / "packages" / "tinker")
    run_python(DOCTOR, str(tmp_path / "packages" / "tinker"))
    newer = tmp_path / "bin" / "python"
    newer.parent.mkdir()
    newer.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/packages exec {PYTHON} "$@"\n')
    newer.chmod(0o755)
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-m",
            "tinker",
            "-k",
            "that_of_the or fields_of_the",
            __file__,
        ],
        env={**os.environ, "CAMSHAFT_TINKER": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 1, process.stdout
    for name in ("SampleResponse.draft_tokens", "AdamParams.momentum"):
        assert (
            f"AssertionError: in the SDK, but not in camshaft/wire: {name}; see docs/serve.md#newer-sdks"
            in process.stdout
        )
