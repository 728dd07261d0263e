"""What `/metrics` answers, and what is built on it: its documentation, dashboard and alerts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from protocol.values.limits import NS_PER_S
from protocol.values.records import session_id_of
from protocol.values.state import State
from recorder.storage.store import RetentionStatistics
from runtime.net.limits import Counters
from runtime.slots.workers import PoolCounts, WorkersStatistics
from runtime.telemetry import catalogue, metrics
from runtime.telemetry.meters import DEADLINE_NS, Backlog, Instruments, ModeInstruments
from runtime.telemetry.metrics import InstrumentCollector, Metrics
from runtime.telemetry.watching import ServerStatus, SessionStatus
from tests.sessions.telemetry import Figures

ROOT: Final = Path(__file__).parents[3]
FROM_PROMETHEUS: Final = {"instance", "job", "le"}
"""Labels that Prometheus adds, and that of histograms."""
ALL: Final = (*catalogue.ALL, *metrics.SERVER_METRICS)


def session_status(number: int = 0, **fields: Any) -> SessionStatus:
    """Make a session's status."""
    given = {
        "recording_id": f"rec-{number:06}",
        "session_id": session_id_of(f"rec-{number:06}"),
        "owner": "team",
        "mode": "video",
        "dialect": "realtime",
        "state": State.ACTIVE,
        "age_s": 61.5,
        "units": 60,
        "chunks": 0,
        "dropped_units": 1,
        "kv_tokens": 1000,
    }
    return SessionStatus(**{**given, **fields})  # type: ignore[arg-type]


def server_status(*sessions: SessionStatus, **fields: Any) -> ServerStatus:
    """Make a server's status."""
    given = {
        "readiness": "ready",
        "version": "1.2.3",
        "model": "tiny",
        "speech": "on",
        "uptime_s": 90_061.0,
        "sessions": sessions,
        "queue_length": 2,
        "slots": PoolCounts(slots=8, free=4, leased=3, condemned=1),
        "connections": 12,
        "tasks": 30,
        "recorder": {
            "logs": 3,
            "backlog_bytes": 4096,
            "blocks": 17,
            "file_bytes": 123_456,
            "failures": 1,
        },
        "listener": Counters(
            connections=12,
            websockets=9,
            refused=Counter({"full": 4}),
            dropped=Counter({"stalled": 2}),
            pauses=7,
            receiving_bytes=512,
        ),
        "workers": WorkersStatistics(workers=2, condemned=1, replaced=3, failures=5),
        "workers_wanted": 4,
        "denied": {"wrong_key": 6},
        "retention": RetentionStatistics(
            logs=7, file_bytes=900, removed={"age": 2}, removed_bytes=300, failures=1
        ),
        "store": {"uploaded": 5, "uploaded_bytes": 800, "failures": 2, "waiting": 1},
    }
    return ServerStatus(**{**given, **fields})  # type: ignore[arg-type]


def full_metrics() -> Metrics:
    """Make the metrics of a server as it serves."""
    status = server_status(session_status(0), session_status(1, kv_tokens=500))
    return Metrics(status=lambda: status, process=True)


# -- what is answered -----------------------------------------------------------------------------


def test_a_server_s_state_is_told() -> None:
    """An operator would see sessions and nothing of the server that holds them."""
    seen = Figures(full_metrics())
    assert seen("ready") == 1
    assert seen("readiness", state="ready") == 1
    assert seen("readiness", state="draining") == 0
    assert seen("sessions", mode="video", state="ACTIVE") == 2
    assert seen("sessions", mode="chat", state="QUEUED") == 0
    assert [seen("slots", state=state) for state in ("free", "leased", "condemned")] == [4, 3, 1]
    assert (seen("kv_tokens"), seen("kv_tokens_largest")) == (1500, 1000)
    assert [seen(name) for name in ("queue_length", "connections", "tasks")] == [2, 12, 30]
    assert seen("recorder_backlog_bytes") == 4096
    assert seen("recorder_failures_total") == 1
    assert seen("connections_refused_total", cause="full") == 4
    assert seen("connections_refused_total", cause="tls") == 0
    assert seen("connections_dropped_total", cause="stalled") == 2
    assert seen("requests_denied_total", reason="wrong_key") == 6
    assert seen("requests_denied_total", reason="origin") == 0
    assert (seen("recordings"), seen("recordings_bytes")) == (7, 900)
    removed = [seen("recordings_removed_total", cause=cause) for cause in ("age", "size")]
    assert (removed, seen("recordings_removed_bytes_total")) == ([2, 0], 300)
    assert seen("recordings_removals_failed_total") == 1
    stored = ("stored_total", "stored_bytes_total", "store_failures_total", "store_waiting")
    assert [seen(f"recordings_{name}") for name in stored] == [5, 800, 2, 1]
    assert [seen("workers", state=state) for state in ("serving", "condemned")] == [1, 1]
    assert seen("workers_wanted") == 4
    assert (seen("workers_replaced_total"), seen("worker_loads_failed_total")) == (3, 5)
    assert seen("build_info", version="1.2.3", model="tiny", speech="on") == 1


def test_a_server_that_loads_can_be_asked() -> None:
    """A server that loads its model would look like one that is down."""
    status = server_status(readiness="loading", slots=None, speech=None, recorder={}, workers=None)
    seen = Figures(Metrics(status=lambda: status))
    assert seen("ready") == 0
    assert seen("readiness", state="loading") == 1
    assert seen("sessions", mode="video", state="ACTIVE") == 0


def test_nobody_is_asked_before_somebody_looks() -> None:
    """Making the metrics would need a server that is not there yet."""
    Metrics(status=lambda: pytest.fail("asked"))


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4;q=0.3", False),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2", True),
        ("text/html, Application/OpenMetrics-Text", True),
    ],
)
def test_the_format_is_the_one_that_was_asked_for(accept: str, is_open: bool) -> None:
    """A collector would be sent what it cannot read."""
    body, content_type = full_metrics().text(accept)
    parse = parse_openmetrics if is_open else parse_text
    names = {family.name for family in parse(body.decode())}
    assert {"antiphon_units", "antiphon_slots", "process_open_fds"} <= names
    assert content_type.startswith("application/openmetrics-text" if is_open else "text/plain")


@given(st.text())
def test_whatever_is_accepted_something_is_answered(accept: str) -> None:
    """A header would break the scrape, or come back in a header of ours."""
    body, content_type = Metrics().text(accept)
    assert body
    assert content_type in {Metrics().text()[1], Metrics().text(OPEN)[1]}


OPEN: Final = "application/openmetrics-text"


def test_two_servers_count_apart() -> None:
    """A second server in the process would fail to start, or count into the first."""
    first, second = Metrics(), Metrics()
    assert first.registry is not second.registry


@given(st.lists(st.floats(0, 10), max_size=30))
def test_a_histogram_holds_what_was_observed(values: list[float]) -> None:
    """Every quantile that is drawn would be wrong."""
    metric = catalogue.CHUNK_SECONDS
    made = Instruments()
    for value in values:
        ModeInstruments(made, "transcription").observe({metric: value})
    family = next(
        one for one in InstrumentCollector(made, Backlog()).collect() if one.name == metric.name
    )
    samples = {(one.name, one.labels.get("le")): one.value for one in family.samples}
    for bound in metric.buckets:
        found = next(le for _, le in samples if le not in (None, "+Inf") and float(le) == bound)
        expected = sum(value <= bound for value in values)
        assert samples[f"{metric.name}_bucket", found] == expected
    assert samples[f"{metric.name}_bucket", "+Inf"] == len(values)
    assert samples[f"{metric.name}_count", None] == len(values)
    assert samples[f"{metric.name}_sum", None] == pytest.approx(sum(values))


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_names_are_as_prometheus_has_them(metric: catalogue.Metric) -> None:
    """Tools that go by the conventions would misread a metric."""
    assert re.fullmatch(r"antiphon_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") is (metric.kind == "counter")
    assert not re.search(r"_(ms|us|ns|millis|kb|mb|percent)(_|$)", metric.name)
    assert bool(metric.buckets) is (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.meaning.endswith(".")
    assert "|" not in metric.meaning


def test_no_two_metrics_share_a_name() -> None:
    """One would hide the other."""
    names = [metric.name for metric in ALL]
    assert len(names) == len(set(names))


def test_the_deadline_is_a_bucket() -> None:
    """Late units could not be read off the histogram."""
    assert DEADLINE_NS / NS_PER_S in catalogue.UNIT_ANSWER_SECONDS.buckets


def test_the_number_of_series_is_known_from_the_start() -> None:
    """A client could make the server, and what scrapes it, run out of memory."""
    lines = [line for line in full_metrics().text()[0].splitlines() if not line.startswith(b"#")]
    assert len(lines) < 1500


# -- what is built on it --------------------------------------------------------------------------


@cache
def samples() -> Mapping[str, tuple[Mapping[str, set[str]], str]]:
    """All sample names of a server, each with its labels and their values."""
    found: dict[str, tuple[dict[str, set[str]], str]] = {}
    for family in parse_text(full_metrics().text()[0].decode()):
        for sample in family.samples:
            labels, _ = found.setdefault(sample.name, ({}, family.type))
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


KEYWORDS: Final = {"by", "without", "on", "ignoring", "and", "or", "unless", "bool", "offset"}


def named(expression: str) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Find the metrics that an expression of PromQL names, each with what it asks of labels."""
    text = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", expression)
    text = re.sub(r"\[[^\]]*\]", " ", text)
    for match in re.finditer(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\}|\()?", text):
        name, follows = match[1], match[2] or ""
        if follows == "(" or name in KEYWORDS:
            continue
        asked = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', follows)
        yield name, {label: (how, value) for label, how, value in asked}


def wrong_with(expression: str) -> list[str]:
    """Say what an expression asks for that there is not."""
    known = samples()
    wrong = []
    for name, asked in named(expression):
        if name == "up":
            continue
        if name not in known:
            wrong.append(f"there is no {name}")
            continue
        labels, _ = known[name]
        for label, (how, value) in asked.items():
            if label in FROM_PROMETHEUS:
                continue
            if label not in labels:
                wrong.append(f"{name} has no {label}")
            elif not all(
                any(re.fullmatch(one, there) for there in labels[label]) for one in value.split("|")
            ):
                wrong.append(f"{name} has no {label} {how} {value}")
    by = re.findall(r"\b(?:by|without)\s*\(([^)]*)\)", expression)
    having = {label for name, _ in named(expression) for label in known.get(name, ({}, ""))[0]}
    grouped = {label.strip() for group in by for label in group.split(",")}
    wrong += [f"nothing there has {label}" for label in grouped - having - FROM_PROMETHEUS]
    if not any(True for _ in named(expression)):
        wrong.append("it names nothing")
    return wrong


def expressions_of(value: Any) -> Iterator[str]:
    """Find all expressions in a dashboard or in rules."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name == "expr":
                yield item
            yield from expressions_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from expressions_of(item)


def dashboard() -> Any:
    return json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text("utf-8"))


def alerts() -> Any:
    return yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text("utf-8"))


@pytest.mark.parametrize(
    "expression",
    [
        "antiphon_unit_total",
        "rate(antiphon_unit_seconds[5m])",
        "rate(antiphon_errors_total{reason='x', kind=\"x\"}[5m])",
        'antiphon_sessions_ended_total{reason="backend_eror"}',
        'antiphon_sessions_ended_total{reason=~"client|nobody"}',
        "sum by (mood) (antiphon_units_total)",
        "1 + 1",
    ],
)
def test_the_check_finds_what_is_wrong(expression: str) -> None:
    """A dashboard of flat lines would pass."""
    assert wrong_with(expression)


@pytest.mark.parametrize("expression", sorted(set(expressions_of(dashboard()))))
def test_the_dashboard_asks_for_what_there_is(expression: str) -> None:
    """A panel would be empty for ever."""
    assert wrong_with(expression.replace("$__rate_interval", "5m").replace("$instance", ".*")) == []


@pytest.mark.parametrize("expression", sorted(set(expressions_of(alerts()))))
def test_the_alerts_ask_for_what_there_is(expression: str) -> None:
    """An alert would never fire."""
    assert wrong_with(expression) == []


def test_the_dashboard_shows_every_part_and_nothing_overlaps() -> None:
    """Grafana would show half of it, or one panel over another."""
    panels = dashboard()["panels"]
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert {"Traffic", "Queue and slots", "Unit loop", "Model", "Recorder", "Errors"} <= set(rows)
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        taken = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        cells |= taken


def test_every_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    """Something would be measured that nobody is shown."""
    asked = [*expressions_of(dashboard()), *expressions_of(alerts())]
    shown = {name for expression in asked for name, _ in named(expression)}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} | shown
    missing = {metric.name for metric in ALL} - shown
    assert missing == {"antiphon_build_info", "antiphon_uptime_seconds"}
    assert "label_values(antiphon_build_info, instance)" in json.dumps(dashboard())


def test_every_alert_says_what_to_do() -> None:
    """Somebody would be woken and not know why."""
    for group in alerts()["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"page", "ticket"}
            assert rule["annotations"]["summary"]
            assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))


def test_prometheus_is_told_of_the_rules() -> None:
    """The alerts would be there and never be looked at."""
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text("utf-8"))
    assert [(ROOT / "deploy" / name).is_file() for name in config["rule_files"]] == [True]
    assert config["scrape_configs"][0]["job_name"] == "antiphon"


def test_the_documentation_asks_for_what_there_is() -> None:
    """A reader would try an expression that gives nothing."""
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| [^|]+\? \| `(.+)` \|$", page, re.MULTILINE)
    assert len(rows) >= 5
    assert [wrong for row in rows for wrong in wrong_with(row)] == []
