"""What /metrics reports, in the format of Prometheus.

    allmask_requests_total{model,task,status}   answered requests
    allmask_request_seconds{model,task}         their latency, a histogram
    allmask_errors_total{kind}                  answers that are problems, by the kind of the error
    allmask_queue_inputs{model}                 inputs that wait; scale by this
    allmask_queue_limit{model}                  inputs that may wait (--queue)
    allmask_batch_inputs{model}                 inputs computed together, a histogram
    allmask_batch_seconds{model}                time to compute a batch, a histogram
    allmask_tokens_total{model,direction}       tokens read, and steps of writing (tokens times beams)
    allmask_reloads_total{result}               reloads of the models

With several workers, each writes its numbers to files in $PROMETHEUS_MULTIPROC_DIR, and any of them reports the sums.
"""

from __future__ import annotations

import os

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.responses import Response

disable_created_metrics()  # the time of the first request of each kind helps nobody
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        place = ("model", "task")
        self.requests = Counter("allmask_requests", "Answered requests.", (*place, "status"), registry=own)
        self.latency = Histogram("allmask_request_seconds", "Latency.", place, registry=own, buckets=SECONDS)
        self.errors = Counter("allmask_errors", "Problems by kind.", ("kind",), registry=own)
        self.queue = Gauge(
            "allmask_queue_inputs", "Inputs that wait.", ("model",), registry=own, multiprocess_mode="livesum"
        )
        self.limit = Gauge(
            "allmask_queue_limit", "Inputs that may wait.", ("model",), registry=own, multiprocess_mode="livesum"
        )
        self.batch = Histogram("allmask_batch_inputs", "Inputs in a batch.", ("model",), registry=own, buckets=SIZES)
        self.compute = Histogram(
            "allmask_batch_seconds", "Time to compute a batch.", ("model",), registry=own, buckets=SECONDS
        )
        self.tokens = Counter("allmask_tokens", "Tokens read and written.", ("model", "direction"), registry=own)
        self.reloads = Counter("allmask_reloads", "Reloads of the models.", ("result",), registry=own)

    def response(self) -> Response:
        registry = self.registry
        if FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
