"""Spans as a collector gets them: in memory, and over HTTP from a background thread."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.errors import NotSupported
from quire.obs.report import FinishReport
from quire.obs.trace import (
    REQUEST_SPAN,
    NullTracer,
    OtelTracer,
    finish_attributes,
    make_tracer,
    request_attributes,
)

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"

REPORT = FinishReport("stop", 10, 4, 5, e2e_s=1.2, queue_s=0.2, prefill_s=0.4, decode_s=0.6)


class Memory:
    """A tracer and what came out of it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = OtelTracer(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


def test_a_request_becomes_a_span() -> None:
    """Red when an attribute boards look for is renamed, or time and kind go missing."""
    memory = Memory()
    span = memory.tracer.start(
        REQUEST_SPAN, None, request_attributes("tiny", "req-1", n=2, max_tokens=16)
    )
    span.event("first_token", {"ttft_s": 0.6})
    span.set(finish_attributes(REPORT, ttft_s=0.6))
    assert memory.spans == ()
    span.end()
    (done,) = memory.spans
    assert (done.name, done.kind, done.parent) == ("llm_request", SpanKind.SERVER, None)
    assert dict(done.attributes or {}) == {
        "gen_ai.system": "quire",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.id": "req-1",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.response.finish_reason": "stop",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.prompt_tokens": 10,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.cached_tokens": 4,
        "gen_ai.latency.e2e": 1.2,
        "gen_ai.latency.time_in_queue": 0.2,
        "gen_ai.latency.time_to_first_token": 0.6,
        "gen_ai.latency.time_in_model_prefill": 0.4,
        "gen_ai.latency.time_in_model_decode": 0.6,
        "gen_ai.latency.time_in_model_inference": 1.0,
    }
    assert [event.name for event in done.events] == ["first_token"]
    assert done.status.status_code is StatusCode.UNSET
    assert done.resource.attributes["service.name"] == "quire"


def test_times_that_never_came_are_left_out() -> None:
    """Red when an aborted request reports a time it did not spend."""
    gone = REPORT._replace(reason="abort", queue_s=None, prefill_s=None, decode_s=None)
    names = set(finish_attributes(gone, ttft_s=None))
    assert {name for name in names if "latency" in name} == {"gen_ai.latency.e2e"}
    assert "gen_ai.request.max_tokens" not in request_attributes("m", "r", 1, None)


def test_the_callers_trace_goes_on() -> None:
    """Red when a traceparent is ignored, or sticks to the request after."""
    memory = Memory()
    memory.tracer.start(REQUEST_SPAN, TRACEPARENT).end()
    memory.tracer.start(REQUEST_SPAN, None).end()
    below, alone = memory.spans
    assert below.context is not None and below.parent is not None and alone.context is not None
    assert f"{below.context.trace_id:032x}" == TRACE_ID
    assert f"{below.parent.span_id:016x}" == PARENT_ID
    assert alone.parent is None and alone.context.trace_id != below.context.trace_id


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        "00-0-0-01",
        TRACEPARENT + "\r\nx: y",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        "00-" + "é" * 32 + f"-{PARENT_ID}-01",
        "0" * 100_000,
    ],
)
def test_a_bad_traceparent_starts_a_trace_of_its_own(header: str) -> None:
    """Red when a client's header can raise, or choose an invalid trace."""
    memory = Memory()
    memory.tracer.start(REQUEST_SPAN, header).end()
    (span,) = memory.spans
    assert span.parent is None and span.context is not None and span.context.is_valid


def test_an_unsampled_caller_is_respected() -> None:
    """Red when spans are sent for a trace its caller decided not to record."""
    memory = Memory()
    memory.tracer.start(REQUEST_SPAN, TRACEPARENT[:-2] + "00").end()
    assert memory.spans == ()


def test_errors_mark_the_span() -> None:
    """Red when a failed request looks fine."""
    memory = Memory()
    memory.tracer.start(REQUEST_SPAN).end(error="engine restarted")
    (span,) = memory.spans
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "engine restarted"


def test_requests_side_by_side_are_not_nested() -> None:
    """Red when an open span becomes the parent of the next request on the same thread."""
    memory = Memory()
    first, second = memory.tracer.start("a"), memory.tracer.start("b")
    first.end()
    second.end()
    assert [span.parent for span in memory.spans] == [None, None]


def test_a_span_of_another_library_is_no_parent() -> None:
    """Red when whatever span happens to be current on the event loop adopts a request."""
    memory = Memory()
    other = TracerProvider().get_tracer("other")
    with other.start_as_current_span("outer"):
        memory.tracer.start(REQUEST_SPAN).end()
    assert [span.parent for span in memory.spans] == [None]


# ---------------------------------------------------------------- over HTTP


class Collector:
    """An OTLP/HTTP receiver of one test."""

    def __init__(self) -> None:
        received = self.received = []  # (path, content type, body)
        arrived = self.arrived = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                received.append((self.path, self.headers["Content-Type"], body))
                self.send_response(200)
                self.end_headers()
                arrived.set()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http",
        reason="opentelemetry-exporter-otlp-proto-http is not installed",
    )
    collector = Collector()
    yield collector
    collector.close()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/custom/place"])
def test_a_batch_really_arrives(collector: Collector, path: str) -> None:
    """Red when spans stay in the process, arrive at another path or lose their content."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    tracer = make_tracer(collector.url + path, service="quire-test")
    for _ in range(3):
        span = tracer.start(REQUEST_SPAN, TRACEPARENT, request_attributes("tiny", "r", 1, None))
        span.set(finish_attributes(REPORT, 0.6))
        span.end()
    tracer.close()
    assert collector.arrived.wait(5)
    spans = []
    for where, kind, body in collector.received:
        assert where == (path if len(path) > 1 else "/v1/traces")
        assert kind == "application/x-protobuf"
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            assert names["service.name"] == "quire-test"
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert len(spans) == 3
    for span in spans:
        values = {attribute.key: attribute.value for attribute in span.attributes}
        assert span.trace_id.hex() == TRACE_ID and span.parent_span_id.hex() == PARENT_ID
        assert values["gen_ai.request.model"].string_value == "tiny"
        assert values["gen_ai.usage.output_tokens"].int_value == 5
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 0


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", "x"])
def test_other_endpoints_are_refused_at_start(endpoint: str) -> None:
    """Red when a collector nobody can reach is accepted in silence."""
    with pytest.raises(NotSupported, match="want http://host:4318"):
        make_tracer(endpoint)


def test_missing_packages_are_named() -> None:
    """Red when the flag without the packages gives a bare ImportError."""
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "sys.modules['opentelemetry.exporter'] = None\n"
        "from quire.errors import NotSupported\n"
        "from quire.obs.trace import make_tracer\n"
        "make_tracer(None).start('x').end()\n"
        "try: make_tracer('http://localhost:4318')\n"
        "except NotSupported as error: assert 'pip install opentelemetry-sdk' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_an_endpoint_there_is_nothing_to_pay() -> None:
    """Red when tracing that is off makes objects for each request."""
    tracer = make_tracer(None)
    assert isinstance(tracer, NullTracer)
    span = tracer.start(REQUEST_SPAN, TRACEPARENT, {})
    assert span is tracer.start("other")
    span.event("x")
    span.set({"a": 1})
    span.end(error="x")
    tracer.close()
