"""Where the time of a unit goes: by kind of request, and by kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch.profiler import ProfilerActivity, profile

from runtime.commands.bench import Case, EngineRun, Load
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.work import Work

from .virtual import run_virtual

NS_PER_MS: Final = 1e6
SHOWN: Final[dict[str, Any]] = {"row_limit": 40, "max_name_column_width": 70}


@attrs.define
class Spent:
    """What requests of one kind took, the copies to the host included."""

    calls: int = 0
    answers: int = 0
    wall_ms: float = 0.0
    cpu_ms: float = 0.0


@attrs.define
class Meter:
    """Times what a model computes, each request to its end."""

    spent: dict[str, Spent] = attrs.field(factory=dict)

    def around(self, compute: Callable[[Sequence[Work]], list[Any]]) -> Any:
        """Compute, timed."""

        def metered(works: Sequence[Work]) -> list[Any]:
            began, cpu = time.perf_counter_ns(), time.thread_time_ns()
            answers = compute(works)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            rows = getattr(works[0], "rows", None)
            kind = type(works[0]).__name__ + (f" {len(rows)}" if rows is not None else "")
            each = self.spent.setdefault(kind, Spent())
            each.calls += 1
            each.answers += len(works)
            each.wall_ms += (time.perf_counter_ns() - began) / NS_PER_MS
            each.cpu_ms += (time.thread_time_ns() - cpu) / NS_PER_MS
            return answers

        return metered


def stages(model: DuplexModel, load: Load, sessions: int) -> tuple[EngineRun, dict[str, Spent]]:
    """Run sessions whose units are due together, in this thread; what their requests took.

    The run's clock is this thread's CPU time, which waiting for a GPU takes too.
    """
    runner, meter = model.runner, Meter()
    case = Case(mode="batched", arrival="together", sessions=sessions)
    before = runner.compute
    runner.compute = meter.around(before)  # type: ignore[method-assign]
    try:
        run = run_virtual(model, load, case)
    finally:
        runner.compute = before  # type: ignore[method-assign]
    return run, meter.spent


def kernels(model: DuplexModel, load: Load, sessions: int) -> str:
    """The kernels and the operators that took most, as torch's profiler shows them."""
    case = Case(mode="batched", arrival="together", sessions=sessions)
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds, record_shapes=True) as found:
        run_virtual(model, load, case)
    tables = (
        found.key_averages().table(sort_by="self_cuda_time_total", **SHOWN),
        found.key_averages().table(sort_by="self_cpu_time_total", **SHOWN),
        found.key_averages(group_by_input_shape=True).table(sort_by="cuda_time_total", **SHOWN),
    )
    return "\n".join(tables)
