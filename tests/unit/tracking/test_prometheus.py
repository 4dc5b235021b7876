"""The page of the Prometheus tracker, read over HTTP and parsed by the client library."""

import math
import re
import socket
import time
import urllib.error
import urllib.request
from itertools import chain, count
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from camshaft.errors import ConfigError
from camshaft.tracking import RunInfo, Tracking, check_trackers
from camshaft.tracking.names import METRICS
from camshaft.tracking.prometheus import prometheus_name
from camshaft.view.panels import ROWS
from tools.grafana_dashboard import PATH, query, text


@pytest.fixture
def address(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("CAMSHAFT_PROMETHEUS", address)
    return address


@pytest.fixture
def run(tmp_path):
    return RunInfo("sums", 'first "run"', tmp_path, total_steps=9)


def page(address, has="") -> Any:
    """Return the page, as soon as the tracker's thread has received a metric."""
    for attempt in count():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            content = response.read().decode()
        if has in content:
            return {family.name: family for family in text_string_to_metric_families(content)}
        assert attempt < 500, content
        time.sleep(0.02)


def test_the_last_values_are_served_with_descriptions_and_labels(address, run):
    with Tracking(["prometheus"], run) as tracking:
        assert page(address) == {}
        tracking.log({"critic/score/mean": 0.25, "val/reward/mean": 0.75}, step=1)
        tracking.log({"critic/score/mean": 0.5, "val-core/gsm8k/reward/mean@8": math.nan, "mine": math.inf}, step=3)
        families = page(address, 'camshaft_step{project="sums",run="first \\"run\\""} 3.0')
    labels = {"project": "sums", "run": 'first "run"'}
    assert all(sample.labels == labels for family in families.values() for sample in family.samples)
    values = {name: family.samples[0].value for name, family in families.items()}
    assert abs(values.pop("camshaft_step_timestamp_seconds") - time.time()) < 60
    assert math.isnan(values.pop("camshaft_val_core_gsm8k_reward_mean_8"))
    assert values == {
        "camshaft_step": 3,
        "camshaft_total_steps": 9,
        "camshaft_critic_score_mean": 0.5,
        "camshaft_val_reward_mean": 0.75,
        "camshaft_mine": math.inf,
    }
    assert families["camshaft_critic_score_mean"].type == "gauge"
    assert families["camshaft_critic_score_mean"].documentation.startswith("Score")


def test_the_page_ends_with_the_run(address, run):
    with Tracking(["prometheus"], run):
        pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10)


def test_a_port_in_use_is_named_with_the_setting(address, run):
    with Tracking(["prometheus"], run), pytest.raises(ConfigError, match=f"{address}.*in use.*CAMSHAFT_PROMETHEUS"):
        Tracking(["prometheus"], run)


@pytest.mark.parametrize("value", ["9464", "localhost:", "localhost:99999", "localhost:http"])
def test_an_address_without_host_and_port_is_rejected(value, monkeypatch):
    monkeypatch.setenv("CAMSHAFT_PROMETHEUS", value)
    with pytest.raises(ConfigError, match=rf"must be host:port, .* got '{value}'"):
        check_trackers(["prometheus"])


def test_no_two_metrics_share_a_prometheus_name():
    names = {name for metric in METRICS for name in metric.names()}
    assert len({prometheus_name(name) for name in names}) == len(names)


def test_the_dashboard_is_generated_from_the_panels_of_the_page():
    assert PATH.read_text(encoding="utf-8") == text(), "run `make docs`"


def test_a_chart_selects_the_metrics_of_its_panel():
    names = {name for metric in METRICS for name in metric.names() if "<" not in name}
    for panel in chain.from_iterable(ROWS.values()):
        pattern = re.search(r'__name__=~"(.*?)"', query(panel))
        assert pattern is not None
        selected = {name for name in names if re.fullmatch(pattern[1], prometheus_name(name))}
        assert selected == set(panel.select(names)), panel.title
