"""The wire of the Tinker API, version of the SDK 0.38: bytes, field numbers and JSON bodies, without their meaning.

    from camshaft.wire import messages, schemas
    request = messages.ForwardBackwardRequest.FromString(body)
    step, ignored = schemas.read(schemas.OptimStep, json.loads(body))

    messages.py   the protobuf messages, described by a table of field numbers, names and types
    schemas.py    the JSON bodies of requests

Only this package imports protobuf (`pip install 'camshaft[serve]'`). It does not need the SDK.
"""
