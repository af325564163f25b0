"""Traces: one span for each request, continuing the caller's trace if it sent a `traceparent`.

The server talks to the small `Tracer` and `Span` below. `NullTracer` does nothing and costs
nothing; `otel_tracer` sends spans to an OTLP/HTTP collector from a background thread, with the
OpenTelemetry packages imported only then. Attribute names are OpenTelemetry's `gen_ai.*`, and
vLLM's where those have none; no span ever holds a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from quire.errors import NotSupported
from quire.obs.report import FinishReport
from quire.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span as OtelApiSpan

Attributes = Mapping[str, str | int | float | bool]

REQUEST_SPAN = "llm_request"
PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"


class Span(Protocol):
    """One piece of work being timed."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Note that something happened now."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Add or replace attributes."""
        ...

    def end(self, error: str | None = None) -> None:
        """Stop the clock; `error` marks it as failed. Call it once."""
        ...


class Tracer(Protocol):
    """Where spans come from."""

    def start(
        self, name: str, traceparent: str | None = None, attributes: Attributes | None = None
    ) -> Span:
        """Begin a span, below the caller's if `traceparent` is a valid W3C header."""
        ...

    def close(self) -> None:
        """Send what is left and stop; spans ended later are lost."""
        ...


class NullSpan:
    def event(self, name: str, attributes: Attributes | None = None) -> None:
        pass

    def set(self, attributes: Attributes) -> None:
        pass

    def end(self, error: str | None = None) -> None:
        pass


class NullTracer:
    """Tracing is off."""

    def __init__(self) -> None:
        self._span = NullSpan()

    def start(
        self, name: str, traceparent: str | None = None, attributes: Attributes | None = None
    ) -> Span:
        return self._span

    def close(self) -> None:
        pass


class OtelSpan:
    def __init__(self, span: OtelApiSpan) -> None:
        self._span = span

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        self._span.add_event(name, dict(attributes or {}))

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, error: str | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class OtelTracer:
    """Spans for whatever processor it is given; `otel_tracer` gives it one that exports.

    The provider is its own, not the process's: importing us changes no other library's traces.
    """

    def __init__(self, processor: SpanProcessor, service: str = "quire") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": service, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self, name: str, traceparent: str | None = None, attributes: Attributes | None = None
    ) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        context = Context()  # empty, not the thread's: requests interleave on one event loop
        if traceparent is not None:
            context = self._propagator.extract({"traceparent": traceparent}, context)
        return OtelSpan(
            self._tracer.start_span(
                name, context, kind=SpanKind.SERVER, attributes=dict(attributes or {})
            )
        )

    def close(self) -> None:
        self._provider.shutdown()


def check_endpoint(endpoint: str) -> None:
    """Raises NotSupported for what is no address of an OTLP/HTTP collector, and where the packages
    are missing."""
    try:
        address = urlsplit(endpoint)
        is_url = address.scheme in ("http", "https") and bool(address.hostname)
        is_url = is_url and address.port != 0  # reading it raises where it is no port
    except ValueError:
        is_url = False
    if not is_url:
        raise NotSupported(
            f"got OTLP endpoint {endpoint!r}, want http://host:4318 or https://...;"
            " the gRPC port (4317) is not spoken here, collectors offer HTTP on 4318"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise NotSupported(
            f"traces to {endpoint} need packages that are not installed ({error});"
            f" pip install {PACKAGES}"
        ) from error


def otel_tracer(endpoint: str, service: str = "quire") -> OtelTracer:
    """A tracer that sends batches to an OTLP/HTTP collector, e.g. http://localhost:4318.

    `/v1/traces` is added to an address without a path. Raises what `check_endpoint` does.
    """
    check_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    is_bare = urlsplit(endpoint).path in ("", "/")
    url = endpoint.rstrip("/") + "/v1/traces" if is_bare else endpoint
    return OtelTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)), service)


def make_tracer(endpoint: str | None, service: str = "quire") -> Tracer:
    """What `--otlp-traces-endpoint` asks for; without it, nothing."""
    return NullTracer() if endpoint is None else otel_tracer(endpoint, service)


def request_attributes(
    model: str, request_id: str, n: int, max_tokens: int | None
) -> dict[str, str | int | float | bool]:
    """What is known of a request when its span starts."""
    known: dict[str, str | int | float | bool] = {
        "gen_ai.system": "quire",
        "gen_ai.request.model": model,
        "gen_ai.request.id": request_id,
        "gen_ai.request.n": n,
    }
    return known if max_tokens is None else known | {"gen_ai.request.max_tokens": max_tokens}


def finish_attributes(
    report: FinishReport, ttft_s: float | None
) -> dict[str, str | int | float | bool]:
    """What is known of a completion when its span ends; times that do not apply are left out."""
    inference_s = None if report.prefill_s is None else report.prefill_s + (report.decode_s or 0.0)
    times = {
        "gen_ai.latency.e2e": report.e2e_s,
        "gen_ai.latency.time_in_queue": report.queue_s,
        "gen_ai.latency.time_to_first_token": ttft_s,
        "gen_ai.latency.time_in_model_prefill": report.prefill_s,
        "gen_ai.latency.time_in_model_decode": report.decode_s,
        "gen_ai.latency.time_in_model_inference": inference_s,
    }
    return {
        "gen_ai.response.finish_reason": report.reason,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.output_tokens,
        # The older names, which vLLM sends and boards built for it read.
        "gen_ai.usage.prompt_tokens": report.prompt_tokens,
        "gen_ai.usage.completion_tokens": report.output_tokens,
        "gen_ai.usage.cached_tokens": report.cached_tokens,
        **{name: seconds for name, seconds in times.items() if seconds is not None},
    }
