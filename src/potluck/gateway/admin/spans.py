"""OpenTelemetry spans, one for each segment, sent to where `--otlp URL` says. Needs `pip install potluck[otlp]`.

All segments of an answer are in one trace, whose number is made from the answer's name. Nothing of a prompt is told.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

from potluck import __version__
from potluck.core.errors import InputError
from potluck.core.state.events import FailureKind
from potluck.gateway.interfaces import ChoiceRequest


class Spans:
    """`segment` and `failed` as parts.Meter has them."""

    def __init__(
        self, url: str, offset_s: Callable[[], float] = lambda: time.time() - time.monotonic()
    ) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise InputError(
                "--otlp", "needs the OpenTelemetry packages: pip install 'potluck[otlp]'"
            ) from error
        self._trace = trace
        self._provider: Any = TracerProvider(
            resource=Resource.create({"service.name": "potluck-gateway", "service.version": __version__})
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("potluck.gateway")
        self._offset_s = offset_s

    def segment(
        self,
        asked: ChoiceRequest,
        replica: str,
        began_s: float,
        ended_s: float,
        tokens: int,
        problem: str = "",
    ) -> None:
        offset_s = self._offset_s()
        attributes: dict[str, str | int] = {
            "gen_ai.request.model": asked.model,
            "potluck.request": asked.id,
            "potluck.replica": replica,
            "potluck.tokens": tokens,
            "potluck.class": asked.request_class,
        }
        span = self._tracer.start_span(
            "segment",
            context=self._trace_of(asked.id),
            start_time=int((began_s + offset_s) * 1e9),
            attributes=attributes,
        )
        if problem:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, problem[:200]))
        span.end(end_time=int((ended_s + offset_s) * 1e9))

    def failed(self, asked: ChoiceRequest, where: str, kind: FailureKind, why: str) -> None:
        span = self._tracer.start_span("failure", context=self._trace_of(asked.id))
        span.set_attributes({"potluck.where": where, "potluck.kind": kind, "potluck.why": why[:200]})
        span.end()

    def close(self) -> None:
        self._provider.shutdown()

    def _trace_of(self, request: str) -> Any:
        """A context whose trace has a number made from the request's name."""
        digest = hashlib.sha256(request.encode()).digest()
        context = self._trace.SpanContext(
            int.from_bytes(digest[:16], "big") or 1,
            int.from_bytes(digest[16:24], "big") or 1,
            is_remote=True,
            trace_flags=self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED),
        )
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(context))
