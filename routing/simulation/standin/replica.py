"""A stand-in replica without its HTTP: the engine, its clock, its metrics, and the fault it is told to show."""

from __future__ import annotations

import asyncio

from routing.simulation.engine import Engine
from routing.simulation.real_time import RealTimeEngine
from routing.simulation.standin.errors import ApiError, queue_full
from routing.simulation.standin.exposition import render
from routing.simulation.standin.faults import CrashAfterChunks, Fault, Hang, NoFault, Refuse, Slow
from routing.simulation.standin.generation import Generation
from routing.simulation.standin.http_metrics import HttpMetrics
from routing.simulation.standin.metrics import EngineMetrics, Rejections
from routing.simulation.standin.process_metrics import process_families
from routing.simulation.standin.requests import Ask
from routing.simulation.standin.settings import ReplicaSettings
from routing.simulation.standin.text import Babble


class Replica:
    """Everything that the HTTP handlers share. Make it on the loop that it will run on."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings
        self.engine = Engine(settings.engine)
        self.runtime = RealTimeEngine(self.engine, asyncio.get_running_loop())
        self.http = HttpMetrics()
        self.in_flight = 0  # HTTP requests for a generation
        self.is_asleep = False
        self.fault: Fault = NoFault()
        self._babble = Babble(settings.seed)
        self._rejections = Rejections()
        engine_metrics = EngineMetrics(self.engine, settings.model, self._rejections)
        self._families = [*process_families(), *engine_metrics.families]

    def generate(self, ask: Ask) -> Generation:
        """Make a generation, not yet started; ApiError where the queue is full or a fault refuses it."""
        if isinstance(self.fault, Refuse):
            raise ApiError(self.fault.status, "Service Unavailable", "The stand-in was told to refuse requests.")
        limit = self.settings.max_queued_requests
        if limit is not None and self.engine.outstanding >= limit:
            self._rejections.requests += 1
            raise queue_full()
        return Generation(ask, self._babble, self.runtime)

    @property
    def crash(self) -> CrashAfterChunks | None:
        """The fault that breaks streams, if that is the one."""
        return self.fault if isinstance(self.fault, CrashAfterChunks) else None

    def set_fault(self, fault: Fault) -> None:
        """Show another fault, or none, from now on."""
        self.fault = fault
        self.engine.slowdown = fault.factor if isinstance(fault, Slow) else 1.0
        self._pause_or_resume()

    def sleep(self) -> None:
        """Stand still and forget the cache, as vLLM does without its sleep mode."""
        self.is_asleep = True
        self._pause_or_resume()
        self.engine.pool.reset()

    def wake(self) -> None:
        """Go on."""
        self.is_asleep = False
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        should_pause = self.is_asleep or isinstance(self.fault, Hang)
        if should_pause and not self.runtime.is_paused:
            self.runtime.pause()
        elif not should_pause and self.runtime.is_paused:
            self.runtime.resume()

    def metrics_page(self) -> bytes:
        """The body of ``/metrics``."""
        return render(self._families + self.http.families)
