"""What a Prometheus server reads at /metrics: vLLM's metrics under the prefix `thinrank:`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.sequence import SequenceMetrics
from ..engine.stats import EngineStats

_PREFIX = "thinrank:"
#: Buckets are vLLM's, so that its dashboards fit.
_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """The metrics of one server. stats: the engine's latest, called when somebody reads."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, stats))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                _PREFIX + name, text, ("model_name",), buckets=buckets, registry=self._registry
            ).labels(model_name)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of started requests.").labels(
            model_name
        )
        self.generation_tokens = counter("generation_tokens", "Tokens generated.").labels(model_name)
        finished = counter("request_success", "Finished continuations, by finish_reason.", "finished_reason")
        self._finished = {
            reason: finished.labels(model_name, reason) for reason in ("stop", "length", "abort")
        }
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From the request to a continuation's first token.", _TTFT
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two tokens of a continuation.", _ITL
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean over a continuation, without its first token.",
            _ITL,
        )
        self._queue_time = histogram(
            "request_queue_time_seconds", "From the request to its first forward pass.", _E2E
        )
        self._prefill_time = histogram(
            "request_prefill_time_seconds", "From its first forward pass to its first token.", _E2E
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From the request to a continuation's last token.", _E2E
        )
        self._request_prompt_tokens = histogram("request_prompt_tokens", "Tokens a prompt.", _TOKENS)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens a continuation.", _TOKENS
        )
        self._responses = Counter(
            _PREFIX + "http_requests",
            "Responses by path and status.",
            ("handler", "status"),
            registry=self._registry,
        )

    def prompt(self, tokens: int) -> None:
        """A prompt goes to the engine."""
        self._prompt_tokens.inc(tokens)
        self._request_prompt_tokens.observe(tokens)

    def scheduled(self, sequence: SequenceMetrics) -> None:
        """The first sequence of a prompt has its first token."""
        assert sequence.first_scheduled is not None and sequence.first_token is not None
        self._queue_time.observe(sequence.first_scheduled - sequence.arrival)
        self._prefill_time.observe(sequence.first_token - sequence.first_scheduled)

    def finished(self, reason: str) -> None:
        """A continuation ended. reason: a finish_reason, or "abort"."""
        self._finished[reason].inc()

    def responded(self, handler: str, status: int) -> None:
        self._responses.labels(handler, str(status)).inc()

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class ContinuationTimer:
    """Watches one continuation. Times are those of `perf_counter`."""

    def __init__(self, metrics: Metrics, started: float):
        self._metrics = metrics
        self._started = started
        self._first = self._last = started
        self._open = True
        self.tokens = 0

    def token(self, time: float) -> None:
        if self.tokens == 0:
            self._first = time
            self._metrics.time_to_first_token.observe(time - self._started)
        else:
            self._metrics.inter_token_latency.observe(time - self._last)
        self._last = time
        self.tokens += 1
        self._metrics.generation_tokens.inc()

    def finish(self, reason: str) -> None:
        """The first call counts."""
        if not self._open:
            return
        self._open = False
        self._metrics.finished(reason)
        if reason == "abort":
            return
        self._metrics.e2e_latency.observe(self._last - self._started)
        self._metrics.request_generation_tokens.observe(self.tokens)
        if self.tokens > 1:
            self._metrics.time_per_output_token.observe((self._last - self._first) / (self.tokens - 1))


class _EngineCollector(Collector):
    """The engine's own numbers."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]):
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        gauges = (
            ("num_requests_running", "Sequences that take part in steps.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait for room.", stats.num_waiting),
            (
                "kv_cache_usage_perc",
                "Share of the KV blocks in use; 1 is all.",
                stats.kv_cache_usage,
            ),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
            ("num_preemptions", "Sequences put back for want of blocks.", stats.num_preemptions),
        )
        for name, text, value in gauges:
            yield self._labelled(GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"]), value)
        for name, text, value in counters:
            yield self._labelled(CounterMetricFamily(_PREFIX + name, text, labels=["model_name"]), value)

    def _labelled(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._model_name], value)
        return family
