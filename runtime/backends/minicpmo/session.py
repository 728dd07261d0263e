"""One session of a duplex model, blocking: open, run a unit, finalize, roll back, release.

What the session is stands in `state.py`; what a unit does to it stands in `unit.py`. This file
keeps the order of calls and the state from the unit's start, so that `rollback` restores it
exactly.

`interrupt` may come from any thread: it names a unit, and that unit stops before its next step
of the language model, the speech decoder or the vocoder. Where it stopped is in the result, and
`run_unit(unit, cut)` stops there again. An interrupt that comes before its unit has begun waits for
it, since whoever sends it believes the unit to be running.
"""

from __future__ import annotations

import time
from typing import Final, Literal

import torch

from protocol.model import UNIT_BYTES, Cut, Finalized, Opened, Opening, Stage, Unit, UnitResult

from ..base import BackendError, ContextFull
from .audio import EMBEDDINGS
from .decide import fed_max
from .parts import Parts
from .prompt import prefill_prompt
from .state import SessionState, Speech, feed
from .tokens import Tokens
from .unit import UnitRun
from .vision import QUERIES
from .vocoder import Vocoder

FINALIZE_TOKENS: Final = 2
"""The terminator and `</unit>`."""

Phase = Literal["ready", "ran", "failed", "released"]


class ModelSession:
    """One session; calls never overlap, but for `interrupt`."""

    def __init__(self, parts: Parts, tokens: Tokens, vocoder: Vocoder, opening: Opening) -> None:
        """Prefill the prompt.

        Args:
            parts: the weights; shared, never changed.
            tokens: the tokenizer; shared.
            vocoder: shared; what it keeps between calls is in the session's state.
            opening: the session's settings.

        Raises:
            ContextFull: the prompt does not fit.
            BackendError: the reference audio is malformed.
        """
        self._parts, self._tokens, self._vocoder, self._opening = parts, tokens, vocoder, opening
        with torch.inference_mode():
            cache, fed = prefill_prompt(parts, tokens, opening)
            self._state = SessionState(audio=parts.apm.start(), cache=cache, length=cache.length)
        self._before = self._state
        self._phase: Phase = "ready"
        self._terminator = tokens.ids.listen
        self._running = -1
        self._interrupted = -1
        self.opened = Opened(prompt_length=cache.length, fed_ids=fed)

    def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Prefill and generate one unit; see `BackendSession.run_unit`.

        Args:
            unit: one second of sound and its pictures.
            cut: stop just there, whatever `interrupt` says.

        Returns:
            The unit's result.

        Raises:
            ContextFull: the worst case does not fit; nothing was fed.
            BackendError: it failed, or was called out of order.
        """
        self._require("ready")
        self._check(unit, cut)

        def stop(stage: Stage, step: int) -> bool:
            if cut is not None:
                return cut == Cut(stage=stage, step=step)
            return self._interrupted == unit.index

        self._running, self._phase, self._before = unit.index, "failed", self._state
        run = UnitRun(
            parts=self._parts,
            tokens=self._tokens,
            vocoder=self._vocoder,
            opening=self._opening,
            unit=unit,
            state=self._state,
            stop=stop,
        )
        try:
            with torch.inference_mode():
                result = run.run()
        except Exception as error:
            raise BackendError(f"unit {unit.index} failed: {error}") from error
        self._state, self._terminator, self._phase = run.state, run.terminator, "ran"
        return result

    def interrupt(self, index: int) -> None:
        """Cut unit `index` before its next step; safe from any thread."""
        self._interrupted = index

    def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Feed the terminator and `</unit>`; see `BackendSession.finalize`.

        An interrupted unit ends with `chunk_eos`, and what its turn was saying aloud is forgotten.

        Raises:
            BackendError: called out of order.
        """
        self._require("ran", index)
        began, ids = time.perf_counter_ns(), self._tokens.ids
        fed = (ids.chunk_eos if interrupted else self._terminator, ids.unit_end)
        state = self._state.but(speech=Speech()) if interrupted else self._state
        with torch.inference_mode():
            self._state, _ = feed(self._parts.llm, state, self._parts.llm.embed(fed))
        self._phase = "ready"
        cost_us = (time.perf_counter_ns() - began) // 1000
        return Finalized(index=index, kv_length=self._state.length, fed_ids=fed, cost_us=cost_us)

    def rollback(self, index: int) -> None:
        """Restore the state from before unit `index`, whether it failed or only ran.

        Raises:
            BackendError: called out of order.
        """
        self._require("failed" if self._phase == "failed" else "ran", index)
        self._state = self._before
        with torch.inference_mode():
            self._state.restore()
        self._interrupted, self._phase = -1, "ready"

    def release(self) -> None:
        """Give the caches back; releasing again does nothing, any other call fails."""
        if self._phase != "released":
            self._phase = "released"
            del self._state, self._before

    def _require(self, phase: Phase, index: int | None = None) -> None:
        if self._phase != phase or (index is not None and index != self._running):
            wanted = phase if index is None else f"{phase} with unit {index}"
            raise BackendError(
                f"call out of order: session is {self._phase} with unit {self._running}, "
                f"not {wanted}"
            )

    def _check(self, unit: Unit, cut: Cut | None) -> None:
        if len(unit.pcm) != UNIT_BYTES:
            raise BackendError(f"unit {unit.index} has {len(unit.pcm)} bytes, not {UNIT_BYTES}")
        if cut is not None and cut.stage == "prefill":
            raise BackendError("prefill is one step here, and a unit is never cut in it")
        pictures = len(unit.frames) * (QUERIES + 2)
        most = 1 + pictures + EMBEDDINGS + fed_max(self._opening.config) + FINALIZE_TOKENS
        limit = self._parts.config.context_limit
        if self._state.length + most > limit:
            raise ContextFull(
                f"unit {unit.index} may need {most} tokens; "
                f"{self._state.length} of {limit} are used"
            )
