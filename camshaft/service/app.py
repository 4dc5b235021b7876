"""Routes of the Tinker API: HTTP requests, keys, bodies and replies. Nothing else in this package knows HTTP.

    app = App(service, Keys({digest(key): "local"}))
    LocalServer(app, ServerLimits(...), host=..., port=...)

Every request has a key in the header X-API-Key, which is checked before its body is read. A mistake of a client is a
reply that the SDK does not repeat, or the result of a future. After an error of the server, which has the status 500,
the SDK repeats the request; the traceback is in the log.
"""

import json
import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn

from camshaft.http import Reply, Request, json_reply
from camshaft.plugins import TESTED_SDK
from camshaft.service.errors import Refused
from camshaft.service.keys import Keys
from camshaft.service.runs import Page
from camshaft.service.service import Service
from camshaft.wire import messages, schemas

PREFIX = "/api/v1/"
POLL_SECONDS = 20.0
"""Time for which the server holds a request for a pending result. The SDK waits for 45 s at most."""
MAX_POLLS = 512
"""Number of requests for samples that the SDK keeps open at the same time."""
RUN = "training_runs/[^/]+"
NOT_SERVED = {
    f"{RUN}/checkpoints/.*external_weights_urls": "weights are not exported to clients; run `camshaft export` on the "
    "machine of the server",
    "copy_weights": "saved weights are not copied; load them in a new training client, and call save_state",
    f"{RUN}/checkpoints/.*publish": "weights are not published; run `camshaft export` on the machine of the server, "
    "and upload the folder",
    "billing/.*": "a server of your own sends no bills; `tinker checkpoint list` has the sizes of saved weights",
    "audit.*": "there is no audit log; log.txt in the folder of the server has the sessions and their keys",
    "(sessions/[^/]+/project|projects?(/.*)?)": "there are no projects; start one server for each, with `folder` and "
    "`port` of its own, or give each a key (`keys`)",
}
"""What to do instead, by the path of a request."""
CHUNK_BYTES = 5_000_000
REFRESH_SECONDS = 300

logger = logging.getLogger(__name__)

Answer = Callable[[str, Request], Any]
"""Function of the name of a key and a request."""


class App:
    """The Tinker API in front of a service."""

    def __init__(self, service: Service, keys: Keys, poll_seconds: float = POLL_SECONDS):
        self.service, self.keys, self.poll_seconds = service, keys, poll_seconds
        self._reported: set[str] = set()
        """Unknown fields that have been logged."""
        read = self._read
        self._routes: dict[tuple[str, str], Answer] = {
            ("GET", "healthz"): lambda *_: {"status": "ok"},
            ("GET", "get_server_capabilities"): lambda *_: service.capabilities(),
            ("POST", "client/config"): lambda *_: self._flags(),
            ("POST", "client/dynamic_config"): lambda *_: {
                "refresh_interval_sec": REFRESH_SECONDS,
                "sample_cancel_enabled": False,
            },
            ("POST", "telemetry"): lambda *_: {"status": "accepted"},  # and thrown away
            ("POST", "create_session"): read(schemas.CreateSession, service.create_session),
            ("POST", "session_heartbeat"): read(schemas.OfSession, service.heartbeat),
            ("POST", "create_model"): read(schemas.CreateModel, service.create_model),
            ("POST", "get_info"): read(schemas.OfModel, service.get_info),
            ("POST", "forward_backward"): self._train,
            ("POST", "optim_step"): read(schemas.OptimStep, service.submit_step),
            ("POST", "save_weights"): read(schemas.SaveWeights, service.submit_save),
            ("POST", "save_weights_external"): read(schemas.SaveWeightsExternal, service.submit_export),
            ("POST", "load_weights"): read(schemas.LoadWeights, service.submit_load),
            ("POST", "save_weights_for_sampler"): read(schemas.SaveWeightsForSampler, service.submit_publish),
            ("POST", "create_sampling_session"): read(schemas.CreateSamplingSession, service.create_sampling_session),
            ("POST", "asample"): read(schemas.Sample, service.submit_sample),
            ("POST", "retrieve_future"): read(schemas.RetrieveFuture, self._retrieve),
            ("POST", "weights_info"): read(schemas.WeightsInfo, service.weights_info),
        }
        self._patterns = [(method, re.compile(path), answer) for method, path, answer in self._routes_with_names()]

    def _routes_with_names(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """Return the routes with names in their paths: functions of owner, request and these names."""
        service, runs = self.service, self.service.runs

        def set_ttl(owner: str, request: Request, model_id: str, kind: str, name: str) -> Any:
            def answer(owner: str, body: schemas.SetTtl) -> Any:
                return runs.set_ttl(owner, model_id, kind, name, body.ttl_seconds)

            return self._read(schemas.SetTtl, answer)(owner, request)

        run, checkpoint = r"training_runs/([^/]+)", r"training_runs/([^/]+)/checkpoints/([^/]+)/([^/]+)"
        return [
            ("GET", r"samplers/([^/]+)", lambda owner, _, name: service.get_sampler(owner, name)),
            ("POST", r"sessions/([^/]+)/finish", lambda owner, _, name: service.finish_session(owner, name)),
            ("GET", "sessions", lambda owner, request: runs.list_sessions(owner, Page.of_query(request.query, 20))),
            ("GET", r"sessions/([^/]+)", lambda owner, _, name: runs.get_session(owner, name)),
            ("GET", "training_runs", lambda owner, request: runs.list_runs(owner, Page.of_query(request.query, 20))),
            ("GET", run, lambda owner, _, name: runs.get_run(owner, name)),
            (
                *("GET", rf"{run}/checkpoints"),
                lambda owner, request, name: runs.list_checkpoints(owner, Page.of_query(request.query), name),
            ),
            ("GET", "checkpoints", lambda owner, request: runs.list_checkpoints(owner, Page.of_query(request.query))),
            ("DELETE", checkpoint, lambda owner, _, *names: runs.delete(owner, *names)),
            ("PUT", rf"{checkpoint}/ttl", set_ttl),
        ]

    # -- the interface of the server core -----------------------------------------------------------

    def refuse(self, request: Request) -> Reply | None:
        """Refuse a request without a known key."""
        if self.keys.owner_of(request.headers.get("X-API-Key", "")) is None:
            text = "the API key is missing or unknown; set TINKER_API_KEY to the key that camshaft serve has printed"
            return json_reply({"detail": text}, HTTPStatus.UNAUTHORIZED, close=True)
        return None

    def answer(self, request: Request) -> Reply:
        """Answer a permitted request."""
        owner = self.keys.owner_of(request.headers.get("X-API-Key", ""))
        try:
            assert owner is not None
            value = self._find_route(request)(owner, request)
        except Refused as error:
            return json_reply({"detail": str(error)}, error.status)
        except schemas.InvalidBody as error:
            return json_reply({"detail": str(error)}, HTTPStatus.UNPROCESSABLE_ENTITY)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            text = f"{type(error).__name__}: {error}; log.txt in the folder of the server has the traceback"
            return json_reply({"detail": text}, HTTPStatus.INTERNAL_SERVER_ERROR)
        return value if isinstance(value, Reply) else json_reply(value)

    def _find_route(self, request: Request) -> Answer:
        path = request.path.removeprefix(PREFIX)
        if request.path.startswith(PREFIX):
            if (request.method, path) in self._routes:
                return self._routes[request.method, path]
            for method, pattern, function in self._patterns:
                match = pattern.fullmatch(path)
                if request.method == method and match is not None:
                    names = match.groups()
                    return lambda owner, request, function=function, names=names: function(owner, request, *names)
        self._refuse_path(request)

    @staticmethod
    def _refuse_path(request: Request) -> NoReturn:
        path = request.path.removeprefix(PREFIX)
        remedies = [remedy for pattern, remedy in NOT_SERVED.items() if re.fullmatch(pattern, path)]
        remedy = remedies[0] if remedies else "see 'Differences from the hosted service' in docs/serve.md"
        raise Refused(f"{request.method} {request.path} is not served by camshaft: {remedy}", HTTPStatus.NOT_FOUND)

    # -- bodies ---------------------------------------------------------------------------------------

    def _read(self, schema: type[Any], function: Callable[[str, Any], Any]) -> Answer:
        """Return a route that reads a JSON body."""

        def answer(owner: str, request: Request) -> Any:
            try:
                content = json.loads(request.body or b"{}", parse_constant=_refuse_constant)
            except ValueError as error:
                raise schemas.InvalidBody(f"the body is no JSON: {error}") from error
            body, ignored = schemas.read(schema, content)
            self._report(request.path, ignored)
            return function(owner, body)

        return answer

    def _report(self, path: str, ignored: list[str]) -> None:
        """Log unknown fields, each once."""
        for name in ignored:
            if (entry := f"{path}: {name}") not in self._reported and len(self._reported) < 1000:
                self._reported.add(entry)
                logger.warning("%s is a field that this version does not know; it is ignored", entry)

    def _train(self, owner: str, request: Request) -> Any:
        if "protobuf" not in request.headers.get("Content-Type", ""):
            raise Refused(f"forward_backward is read as protobuf only; install tinker{TESTED_SDK}")
        if "Content-Encoding" in request.headers:
            raise Refused("forward_backward is read without compression; the flag proto_compress_fwdbwd is off")
        try:
            message = messages.decode(messages.ForwardBackwardRequest, request.body)
        except ValueError as error:
            raise schemas.InvalidBody(str(error)) from error
        return self.service.submit_training(owner, message)

    def _retrieve(self, owner: str, body: schemas.RetrieveFuture) -> Reply:
        """Answer with a result, or after a time with the status at which the SDK asks again."""
        result = self.service.retrieve(owner, body, self.poll_seconds)
        if result is not None:
            return Reply(HTTPStatus.OK, result.body, result.kind)
        pending = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return json_reply(pending | {"queue_state_reason": None}, HTTPStatus.REQUEST_TIMEOUT)

    def _flags(self) -> dict[str, Any]:
        """Return how the SDK is to send its requests. Protocols that need not be served are off."""
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "fwdbwd_max_chunk_len": self.service.config.max_data,
            "fwdbwd_max_chunk_bytes_count": min(CHUNK_BYTES, self.service.config.max_megabytes * 2**20 // 2),
            "proto_compress_fwdbwd": False,
            "sample_use_retrieve_futures": False,
            "sample_join_sampling_session": False,
            "custom_loss_server_side": False,
            "sample_max_concurrent_requests": MAX_POLLS,
        }


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
