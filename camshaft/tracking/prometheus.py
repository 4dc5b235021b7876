"""Prometheus tracker: serves the last value of each metric to a Prometheus server, while the run lasts.

    CAMSHAFT_PROMETHEUS=0.0.0.0:9464 camshaft ppo ... trainer.logger=[console,jsonl,prometheus]
    curl http://localhost:9464/metrics

Each metric is a gauge with the labels `project` and `run`. Characters that Prometheus does not allow in names become
underscores: `critic/score/mean` is `camshaft_critic_score_mean`. The gauges `camshaft_step`, `camshaft_total_steps` and
`camshaft_step_timestamp_seconds` show the progress of the run.
"""

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from camshaft.errors import ConfigError
from camshaft.tracking.base import RunInfo, Tracker
from camshaft.tracking.names import find

ADDRESS = "CAMSHAFT_PROMETHEUS"
"""Environment variable with the address to listen on, as `host:port`."""
DEFAULT_ADDRESS = "127.0.0.1:9464"

logger = logging.getLogger(__name__)


class PrometheusTracker(Tracker, Collector):
    """Serve the last value of each metric from a thread."""

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if the address cannot be parsed."""
        _address()

    def __init__(self, run: RunInfo):
        self._labels = {"project": run.project, "run": run.experiment}
        self._total_steps = run.total_steps
        self._gauges: dict[str, GaugeMetricFamily] = {}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        host, port = _address()
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"the tracker 'prometheus' cannot listen on {host}:{port}: {error.strerror}. "
                f"Set {ADDRESS} to another address, for example {host}:{port + 1}"
            ) from error
        logger.info("prometheus: http://%s:%d/metrics", host, self._server.server_port)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        gauges = [
            self._gauge("camshaft_step", step, "Last completed step."),
            self._gauge("camshaft_total_steps", self._total_steps, "Steps of the run."),
            self._gauge(
                "camshaft_step_timestamp_seconds", time.time(), "Time of the last completed step, Unix seconds."
            ),
            *(self._gauge(prometheus_name(name), value, _description(name)) for name, value in metrics.items()),
        ]
        self._gauges = self._gauges | {gauge.name: gauge for gauge in gauges}

    def finish(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return all gauges. The server calls this method for every request."""
        return self._gauges.values()

    def _gauge(self, name: str, value: float, description: str) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, description, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge


def prometheus_name(metric: str) -> str:
    return "camshaft_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


@cache
def _description(metric: str) -> str:
    """Return the description of a metric from the table of metrics, or its name if the table does not contain it."""
    try:
        return find(metric).description
    except ConfigError:
        return metric


def _address() -> tuple[str, int]:
    text = os.environ.get(ADDRESS, DEFAULT_ADDRESS)
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{ADDRESS} must be host:port, for example {DEFAULT_ADDRESS}, got '{text}'")
    return host, int(port)
