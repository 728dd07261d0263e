"""Memory of sessions that share pages, and what pressure does: `python -m tests.bench.pages`.

The sessions, their windows, the rules of memory and the engine's scheduler are the real ones, on a
clock of whole seconds; only the numbers are not computed: what the model decides is drawn. So pages
are counted exactly, as bytes of the published shape in bf16. Each slot is always taken: sessions of
10 s to 4 min, chats if asked for, and after a session's end the next one.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from functools import partial
from typing import Any, Final

import attrs
import torch

from protocol.values.limits import NS_PER_S
from protocol.values.model import (
    UNIT_BYTES,
    ChatConfig,
    DuplexConfig,
    Message,
    Opening,
    SlidingWindow,
    SpeechConfig,
    Text,
    Turn,
    Unit,
    Voice,
)
from runtime.model.backends.base import BackendError, ContextFull
from runtime.model.backends.minicpmo import attention
from runtime.model.backends.minicpmo.attention import KvSlots
from runtime.model.backends.minicpmo.audio import EncodeAudio
from runtime.model.backends.minicpmo.config import read_config
from runtime.model.backends.minicpmo.device import SHARED, stores
from runtime.model.backends.minicpmo.logits import CodeLogits, TokenLogits
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.session import SteppedSession
from runtime.model.backends.minicpmo.vocoder import Prepare, Vocode
from runtime.model.backends.minicpmo.work import Feed, LlmOutput, Speak, Work
from runtime.model.engine.backend import BATCH_MAX
from runtime.model.engine.engine import BACKGROUND, Scheduler, Task
from runtime.model.models import tiny_path
from tests.models.full_shape import full_config, random_model
from tests.models.random_model import CONFIG, SMALL, changed
from tests.project.evidence import add_out, keep

LASTS: Final = (10, 20, 30, 60, 90, 120, 180, 240)
"""Seconds of sessions."""
TRIES: Final = 3
"""Of an opening that finds no memory, as the server makes them; here a second apart."""
TALKS: Final = (0.0, 0.2, 0.5)
"""Shares of units that are spoken, of which each session has one."""
WORDS: Final = 40
"""Of the instructions, three tokens each."""
TURNS_MAX: Final = 200
"""Requests of a session within a second, at the very most."""
PERCENTS: Final = (50, 15)
SHAPES: Final = stores(full_config())
ROW_BYTES: Final = {
    name: SHAPES[name].slot_bytes(torch.bfloat16) // SHAPES[name].capacity for name in SHARED
}
"""Of a token, and of a row of the speech decoder, in the published shape."""


@attrs.define
class Seen:
    """What was seen of a run; `most_moved`: within a second."""

    units: int = 0
    most_sessions: int = 0
    most_bytes: int = 0
    moved_bytes: int = 0
    most_moved: int = 0
    ends: Counter[str] = attrs.field(factory=Counter)


class Slot:
    """What is in a slot: a session of so many seconds, or one that is being opened."""

    def __init__(self, session: SteppedSession, seconds: int, talks: float) -> None:
        self.session, self.left, self.talks = session, seconds, talks
        self.units, self.tries, self.is_open, self.end = 0, 0, False, ""


class Run:
    """Sessions on a model whose answers are drawn; see the module's docstring.

    Args:
        chats: share of chats among those that come.
        windows: of which each session has one.
    """

    def __init__(
        self,
        model: DuplexModel,
        *,
        seed: int,
        lasts: tuple[int, ...] = LASTS,
        chats: float = 0.0,
        windows: tuple[SlidingWindow, ...] = ("off",),
    ) -> None:
        self.model, self._stores = model, {name: getattr(model.runner, name) for name in SHARED}
        self.seen, self._draw = Seen(), random.Random(seed)
        self._lasts, self._chats, self._windows = lasts, chats, windows
        self._slots: list[Slot | None] = [None] * model.info.slots
        self._scheduler = Scheduler(self._compute, batch_max=BATCH_MAX)
        self._words = model.tokens.encode("the quick brown fox jumps over the lazy dog")
        self._width = int(model.runner.config.llm.hidden_size)
        for name, store in self._stores.items():
            self._count_moves(store, ROW_BYTES[name])

    def run(self, seconds: int) -> Seen:
        """Let the time pass, then release all."""
        for now in range(seconds):
            self._second(now)
        for number, slot in enumerate(self._slots):
            if slot is not None:
                self._leave(number, slot, "running")
        assert not self._held
        return self.seen

    @property
    def _held(self) -> int:
        """Bytes that sessions have."""
        stores = self._stores.items()
        return sum((store.positions - store.free) * ROW_BYTES[name] for name, store in stores)

    def _count_moves(self, store: KvSlots, row_bytes: int) -> None:
        move = store._move

        def counted(slot: int, begin: int) -> None:
            self.seen.moved_bytes += (
                row_bytes * store._written[slot] * (begin != store._begins[slot])
            )
            move(slot, begin)

        store._move = counted  # type: ignore[method-assign]

    def _second(self, now: int) -> None:
        moved = self.seen.moved_bytes
        for number, slot in enumerate(self._slots):
            if slot is None and self._draw.random() < self._chats:
                self._chat(number)
            elif slot is None or not slot.is_open:
                self._open(number, slot)
            elif slot.left:
                unit = Unit(index=slot.units, pcm=bytes(UNIT_BYTES))
                self._add(slot.session.unit(unit, None), now, partial(self._answered, number, now))
            else:
                self._leave(number, slot, "done")
        # Whatever the pressure, everything that was asked for ends: no call waits for memory.
        for _ in range(TURNS_MAX * len(self._slots)):
            if self._scheduler.is_idle:
                break
            self._scheduler.turn(now * NS_PER_S)
        assert self._scheduler.is_idle, "sessions wait for one another"
        seen = self.seen
        seen.most_bytes = max(seen.most_bytes, self._held)
        seen.most_sessions = max(seen.most_sessions, sum(it is not None for it in self._slots))
        seen.most_moved = max(seen.most_moved, seen.moved_bytes - moved)
        for number, slot in enumerate(self._slots):  # As late as a server would.
            if slot is not None and slot.end:
                self._leave(number, slot, slot.end)

    def _open(self, number: int, slot: Slot | None) -> None:
        if slot is None:
            config = DuplexConfig(
                force_listen_count=0, sliding_window=self._draw.choice(self._windows)
            )
            opening = Opening(
                instructions="fox " * WORDS, voice=Voice(), config=config, seed=number
            )
            last, talks = self._draw.choice(self._lasts), self._draw.choice(TALKS)
            session = self.model.session(opening, slot=number)
            slot = self._slots[number] = Slot(session, last, talks)
        else:
            slot.session = self.model.session(slot.session._opening, slot=number)
        slot.tries += 1

        def done(_: Any, error: Exception | None) -> None:
            if error is None:
                slot.is_open = True
                return
            self._require_pressure(error, is_new=True)
            slot.end = "refused" if slot.tries == TRIES else ""

        self._add(slot.session.open(), BACKGROUND, done)

    def _chat(self, number: int) -> None:
        chat, text = self.model.chat(slot=number), "fox " * self._draw.randrange(WORDS)
        chat.measure(
            Turn(
                index=0,
                messages=(Message(role="user", content=(Text(text=text),)),),
                config=ChatConfig(max_new_tokens=40),
                speech=SpeechConfig(),
                max_slice_nums=1,
                use_image_id=False,
                omni=False,
                thinking=False,
                seed=number,
            )
        )

        def done(_: Any, error: Exception | None) -> None:
            if error is None:
                self._add(chat.generate(lambda _: None), BACKGROUND, ended)
            else:
                ended(None, error)

        def ended(_: Any, error: Exception | None) -> None:
            chat.release()
            if error is not None:
                self._require_pressure(error, is_new=True)
            self.seen.ends["chat" if error is None else "chat refused"] += 1

        self._add(chat.prefill(), BACKGROUND, done)

    def _answered(self, number: int, now: int, _: Any, error: Exception | None) -> None:
        slot = self._slots[number]
        assert slot is not None
        if error is not None:
            if "no memory" in str(error):
                self._require_pressure(error, is_new=False)
                slot.end = "short of memory"
            else:
                assert isinstance(error, ContextFull), error
                slot.end = "context full"
            return

        def finalized(_: Any, error: Exception | None) -> None:
            assert error is None, error  # The unit reserved what closes it.
            slot.units, slot.left = slot.units + 1, slot.left - 1
            self.seen.units += 1

        self._add(slot.session.finalize(slot.units, interrupted=False), now, finalized)

    def _require_pressure(self, error: Exception, *, is_new: bool) -> None:
        """Only what the rule refuses is refused."""
        assert isinstance(error, BackendError if is_new else ContextFull), error
        asked = re.search(r"no memory for .*?(\d+) (tokens|codes): ", str(error))
        assert asked is not None, error
        store = self._stores["llm" if asked[2] == "tokens" else "tts"]
        assert store.free < int(asked[1]) + attention.PAGE * (1 + is_new * store.used_slots)

    def _leave(self, number: int, slot: Slot, why: str) -> None:
        slot.session.release()
        self.seen.ends[why] += 1
        self._slots[number] = None

    def _add(self, steps: Any, now: float, done: Any) -> None:
        due_ns = now if now == BACKGROUND else (now + 1) * NS_PER_S
        self._scheduler.add(Task(steps=steps, deadline_ns=due_ns, done=done))

    def _compute(self, works: Any) -> list[Any]:
        return [self._answer(work) for work in works]

    def _answer(self, work: Work) -> Any:
        config, ids = self.model.runner.config, self.model.tokens.ids
        if isinstance(work, EncodeAudio):
            return torch.zeros(config.audio.embeddings, self._width)
        if isinstance(work, Prepare | Vocode):
            return self.model.compute([work])[0]
        assert isinstance(work, Feed | Speak), work
        store = self._stores["llm" if isinstance(work, Feed) else "tts"]
        store.reach(work.slot, work.start + len(work.rows))  # Fails if it was not reserved.
        if isinstance(work, Speak):
            row = torch.zeros(config.tts.eos + 1)
            row[config.tts.eos] = 100.0 * (work.choice is None and self._draw.random() < 0.04)
            return CodeLogits(row)
        slot, chance = self._slots[work.slot], self._draw.random()
        talks = 1.0 if slot is None else slot.talks
        token = self._draw.choice(self._words)
        if len(work.rows) > 1 and chance >= talks:
            token = ids.listen
        elif chance < 0.1:
            token = self._draw.choice((ids.chunk_eos, ids.turn_eos, ids.im_end))
        row = torch.zeros(config.llm.vocab_size)
        row[token] = 50.0
        return LlmOutput(hidden=torch.zeros(self._width), logits=TokenLogits(row, is_finite=True))


def model_of(slots: int, percent: int, context: int = 8192) -> DuplexModel:
    """A model as small as can be, with a context as long as the published one's."""
    own = {
        "vocab_size": 672,
        "max_position_embeddings": context,
        "tts_config": {"num_text_tokens": 640, "max_position_embeddings": context // 2},
    }
    config = read_config(changed(CONFIG, SMALL, own), "pages")
    return random_model(
        config,
        tiny_path(),
        slots=slots,
        device=torch.device("cpu"),
        dtype=torch.float32,
        context_percent=percent,
    )


def main() -> None:
    """Run each share of memory, and keep what was seen."""
    parser = argparse.ArgumentParser(description="memory of sessions that share pages")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--percents", default=",".join(map(str, PERCENTS)))
    add_out(parser)
    options = parser.parse_args()

    def gb(count: int) -> float:
        return round(count / 1e9, 1)

    found = []
    for percent in map(int, options.percents.split(",")):
        model = model_of(options.sessions, percent)
        seen = Run(model, seed=1).run(options.seconds)
        found.append(
            {
                "context_percent": percent,
                "memory_gb": gb(
                    sum(getattr(model.runner, it).positions * ROW_BYTES[it] for it in SHARED)
                ),
                "most_used_gb": gb(seen.most_bytes),
                "most_sessions": seen.most_sessions,
                "units": seen.units,
                "moved_gb_a_minute": gb(seen.moved_bytes * 60 // options.seconds),
                "moved_gb_in_a_second": gb(seen.most_moved),
                "ends": dict(sorted(seen.ends.items())),
            }
        )
    now = gb(options.sessions * sum(SHAPES[name].slot_bytes(torch.bfloat16) for name in SHARED))
    what = {"sessions": options.sessions, "seconds": options.seconds, "lasts": LASTS}
    keep({**what, "whole_contexts_gb": now, "talks": TALKS, "runs": found}, options.out, "pages")


if __name__ == "__main__":
    main()
