"""One unit in the model: prefill, generate, speak.

The rules: docs/model.md, "A session". A turn is open from the first token fed in generate until
`turn_eos` is fed; a listen decided in an open turn becomes `tts_bos`, a listen forced in one feeds
`turn_eos` first. The token of step 0 is neither text nor speech. Finalize feeds terminators,
`chunk_eos` included. A run is a generator of requests (`work.py`) and replaces `state`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.values.model import Costs, Cut, DuplexConfig, Opening, Stage, Unit, UnitResult

from . import sampling
from .audio import EncodeAudio, read_pcm
from .checkpoint import CODES_A_UNIT, Parts
from .logits import CodeChoice, CodeLogits, Trace, numbers_of
from .state import SessionState, Speech
from .tokens import Tokens
from .vocoder import LOOKAHEAD, Vocoder, VocoderBuffer
from .work import EncodeImage, Feed, KnownIds, LlmOutput, Speak, Steps

Pictures = Sequence[Sequence[Tensor]]
"""The slices of each frame of a unit, the whole picture first."""


@attrs.frozen(kw_only=True)
class Setting:
    """The settings of one session's units; without an open voice, text only."""

    parts: Parts
    tokens: Tokens
    vocoder: Vocoder | None
    opening: Opening
    slot: int
    voice: object = attrs.field(default=None, eq=False)

    def forces(self, unit: Unit) -> bool:
        """Whether the unit must listen."""
        is_early = unit.index < self.opening.config.force_listen_count
        return unit.force_listen or (is_early and not unit.force_speak)

    @property
    def speaks(self) -> bool:
        """Whether units are spoken."""
        return self.voice is not None


def input_hash(unit: Unit) -> str:
    """Blake2b-128 of all model input: sound, pictures, flags, events, with their lengths."""
    digest = hashlib.blake2b(digest_size=16)
    flags = f"{unit.force_listen:d} {unit.max_slice_nums} {len(unit.frames)}".encode()
    flags += b" speak" if unit.force_speak else b""
    events = [f"{one.kind} {one.call} {one.text}".encode() for one in unit.inputs]
    for part in (flags, unit.pcm, *unit.frames, *events):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _head(
    tokens: Tokens, pictures: Sequence[Sequence[Tensor]], sound: Tensor
) -> list[Tensor | tuple[int, ...]]:
    """What a unit of the older layout feeds before it decides."""
    ids = tokens.ids
    pieces: list[Tensor | tuple[int, ...]] = [(ids.unit,)]
    for slices in pictures:
        for index, picture in enumerate(slices):
            marks = (ids.slice_, ids.slice_end) if index else (ids.image, ids.image_end)
            pieces += [marks[:1], picture, marks[1:]]
    return [*pieces, sound]


@attrs.define(kw_only=True)
class UnitRun:
    """A unit in progress.

    Attributes:
        pictures: its frames, decoded and sliced.
        stop: asked before each step; True cuts the unit there.
        teacher: forced decisions; None: the unit decides by itself.
        past: the recorded result, if the unit is run again; what it fed one by one is fed at once.
        is_mute: its speech is not computed, since nothing after its turn depends on it.
        terminator: the token for finalize to feed.
        was_open: a turn was open when it began to decide.
        fed: ids fed in generate.
        spoken: text tokens for the speech decoder, each with its hidden state (width,).
        cut: where the unit was cut.
        spent_ns: time by stage.
    """

    setting: Setting
    unit: Unit
    pictures: Pictures
    state: SessionState
    stop: Callable[[Stage, int], bool]
    teacher: sampling.Teacher | None = None
    past: UnitResult | None = None
    is_mute: bool = False
    terminator: int = -1
    was_open: bool = False
    decided: list[int] = attrs.field(factory=list)
    fed: list[int] = attrs.field(factory=list)
    spoken: list[tuple[int, Tensor]] = attrs.field(factory=list)
    codes: list[int] = attrs.field(factory=list)
    sound: list[NDArray[np.float32]] = attrs.field(factory=list)
    cut: Cut | None = None
    spent_ns: dict[Stage, int] = attrs.field(factory=dict)

    def run(self) -> Steps[UnitResult]:
        """Run the unit to its end or its cut."""
        began = time.perf_counter_ns()
        first: LlmOutput = yield from self._prefill()
        trace = first.logits.trace()
        middle = self._spend("prefill", began)
        is_listen = yield from self._answer(first)
        spoken = self._spend("llm", middle)
        if self._is_spoken(is_listen) and not self.is_mute:
            yield from self._speak(last=self._ended)
            vocal = self._spend("tts", spoken)
            if self.cut is None:
                yield from self._voice(last=self._ended)
                self._spend("token2wav", vocal)
        self._close(is_listen)
        return self._result(trace, is_listen=is_listen, began=began)

    @property
    def _ended(self) -> bool:
        return bool(self.fed) and self.fed[-1] == self.setting.tokens.ids.turn_eos

    def _answer(self, first: LlmOutput) -> Steps[bool]:
        """Decide and feed the unit's tokens; True if it listens."""
        if self.setting.forces(self.unit):
            is_listen = yield from self._listen_by_force()
        else:
            is_listen = yield from self._generate(first)
        self.state = self.state.but(text_ids=tuple(index for index, _ in self.spoken))
        return is_listen

    def _is_spoken(self, is_listen: bool) -> bool:
        return not is_listen and self.cut is None and self.setting.speaks

    def _close(self, is_listen: bool) -> None:
        """Note speech that was left out, and end the turn, if the unit did."""
        if self.is_mute and self._is_spoken(is_listen):
            self.state = self.state.but(speech=attrs.evolve(self.state.speech, is_complete=False))
        if self._ended:
            self.state = self.state.but(turn_open=False, speech=Speech())

    def _spend(self, stage: Stage, began: int) -> int:
        now = time.perf_counter_ns()
        self.spent_ns[stage] = now - began
        return now

    def _cut_at(self, stage: Stage, step: int) -> bool:
        if self.stop(stage, step):
            self.cut = Cut(stage=stage, step=step)
        return self.cut is not None

    def _feed(self, rows: Tensor) -> Steps[LlmOutput]:
        """Feed the language model, (T, width)."""
        fed: LlmOutput = yield Feed(slot=self.setting.slot, start=self.state.length, rows=rows)
        self.state = self.state.but(length=self.state.length + len(rows))
        return fed

    def _prefill(self) -> Steps[LlmOutput]:
        """Feed what comes before the decisions: pictures, sound and marks, in one forward."""
        tokens, parts = self.setting.tokens, self.setting.parts
        seen: list[list[Tensor]] = []
        for slices in self.pictures:
            seen.append([])
            for picture in slices:
                rows = yield EncodeImage(picture=picture, is_alone=parts.is_on_cpu)  # (64, width)
                seen[-1].append(rows)
        sound = yield from self._encode_sound()
        if tokens.slots is None:
            pieces = _head(tokens, seen, sound)
        else:
            self.state = self.state.but(has_seen=self.state.has_seen or bool(seen))
            inputs, is_seen = self.unit.inputs, self.state.has_seen
            pieces = tokens.slots.head(seen, sound, inputs, is_seen=is_seen)
        rows = [each if isinstance(each, Tensor) else parts.embed(each) for each in pieces]
        return (yield from self._feed(torch.cat(rows)))

    def _encode_sound(self) -> Steps[Tensor]:
        parts, state = self.setting.parts, self.state
        pcm = torch.from_numpy(read_pcm(self.unit.pcm))  # (16000,)
        mel, carry = parts.front_end.next_frames(pcm, state.mel)
        units = 0 if state.audio_units == parts.config.audio.units else state.audio_units
        embeddings: Tensor = yield EncodeAudio(
            mel=mel, slot=self.setting.slot, units=units
        )  # (10, width)
        self.state = state.but(mel=carry, audio_units=units + 1)
        return embeddings

    def _listen_by_force(self) -> Steps[bool]:
        tokens = self.setting.tokens
        self.terminator = tokens.ids.listen
        self.decided.append(tokens.ids.listen)
        if self.state.turn_open:
            ends = (tokens.ids.turn_eos,) if tokens.slots is None else tokens.slots.end_of_turn
            yield from self._feed(self.setting.parts.embed(ends))
            self.fed += ends
        return True

    def _generate(self, first: LlmOutput) -> Steps[bool]:
        """Decide and feed tokens until a terminator; True if the unit listens."""
        setting, opening = self.setting, self.setting.opening
        tokens, ids, most = setting.tokens, setting.tokens.ids, sampling.fed_max(opening.config)
        numbers = sampling.draws(
            opening.seed, self.unit.index, "llm", sampling.DRAWS_A_STEP * (most + 1)
        )
        numbers = numbers.reshape(-1, sampling.DRAWS_A_STEP)
        fed, self.terminator, known = first, ids.chunk_eos, self._known(most)
        self.was_open, is_in_slots = self.state.turn_open, tokens.slots is not None
        for step in range(most + 1):
            fed.logits.require_finite()
            if self._cut_at("llm", step):
                return False
            if step == most:
                self.decided.append(ids.chunk_eos)
                return False
            token = self._choose(step, fed, numbers[step])
            self.decided.append(token)
            if token == ids.chunk_eos:
                return False
            self._remember(token)
            if token == ids.listen and self.state.turn_open:
                token = ids.tts_bos
            if token in tokens.terminators:
                self.terminator = token
                return token == ids.listen and not self.fed
            if step and not is_in_slots and self._overflows(token):
                return False
            if known is None:
                fed = yield from self._feed(setting.parts.embed((token,)))
            else:
                fed = yield from known.ask(token)
                self.state = self.state.but(length=self.state.length + 1)
            self.fed.append(token)
            self.state = self.state.but(turn_open=token != ids.turn_eos)
            if step and token != ids.tts_pad:
                self.spoken.append((token, fed.hidden))
            if is_in_slots and token in (ids.turn_eos, ids.tts_pad):
                self.decided.append(ids.chunk_eos)
                return False
        raise AssertionError("the last iteration returns")

    def _known(self, most: int) -> KnownIds | None:
        """The tokens that it is known to feed."""
        if self.past is None:
            return None
        start, ids, slot = self.state.length, self.past.fed_ids, self.setting.slot

        def work(at: int) -> Feed:
            rows = self.setting.parts.embed((ids[at],))
            return Feed(slot=slot, start=start + at, rows=rows)

        return KnownIds(ids, work, most)

    def _choose(self, step: int, fed: LlmOutput, numbers: NDArray[np.float64]) -> int:
        """Decide a step's token, or take the recorded one."""
        config, tokens, history = self._config(step), self.setting.tokens, self.state.history
        forbidden = self._forbidden(step)

        def whole() -> NDArray[np.float64]:
            """All logits; of the first step of a unit in slots, those of what it may begin with."""
            logits = numbers_of(fed.logits.whole())
            if tokens.slots is None and tokens.unchatted:
                logits[[*tokens.unchatted]] = -np.inf
            if step or tokens.slots is None:
                return logits
            begins = tokens.slots.speech(0, is_open=self.was_open)
            return sampling.only(logits, tokens.slots.of(*begins))

        def rule(logits: sampling.Candidates) -> int:
            return sampling.decide(logits, history, numbers, config, tokens, forbidden=forbidden)

        if step or tokens.slots is None:
            own = fed.logits.settle(rule)
        else:
            own = rule(sampling.Candidates(values=whole()))
        if self.teacher is None:
            return own

        def gap_to(wanted: int) -> tuple[float | None, float | None]:
            return sampling.token_gap(
                *(whole(), history, numbers, config, tokens),
                own=own,
                wanted=wanted,
                forbidden=forbidden,
            )

        token = self.teacher.token(step, own, gap_to)
        if step == 0:
            is_open = self.state.turn_open
            self.teacher.listen_decision = sampling.listen_decision(
                whole(), history, config, tokens, is_open=is_open, own=own, recorded=token
            )
        return token

    def _forbidden(self, step: int) -> tuple[int, ...] | None:
        """What a step may not decide, of a unit in slots."""
        tokens = self.setting.tokens
        if tokens.slots is None or step == 0:
            return None if tokens.slots is None else ()
        allowed = tokens.slots.speech(step, is_open=self.was_open)
        bad = set(tokens.forbidden).difference(tokens.slots.of(*allowed))
        return (*tokens.slots.all_but(allowed), *bad)

    def _config(self, step: int) -> DuplexConfig:
        """The settings of a step; a unit that must speak cannot begin by listening."""
        config = self.setting.opening.config
        is_forced = self.unit.force_speak and step == 0
        return attrs.evolve(config, listen_prob_scale=0.0) if is_forced else config

    def _remember(self, token: int) -> None:
        history = (*self.state.history, token)[-sampling.REPETITION_WINDOW :]
        self.state = self.state.but(history=history)

    def _text(self, *more: int) -> str:
        return self.setting.tokens.decode([*(index for index, _ in self.spoken), *more])

    def _overflows(self, token: int) -> bool:
        return len(self._text(token)) >= sampling.CHUNK_CHARACTERS

    def _speak(self, *, last: bool) -> Steps[None]:
        """Speak the unit's text: its rows, then code after code, at most a second's."""
        setting, speech = self.setting, self.state.speech
        tts, slot, length = setting.parts.tts, setting.slot, speech.length
        numbers = sampling.draws(setting.opening.seed, self.unit.index, "tts", CODES_A_UNIT)
        may_end = last or length == 0

        def choice(codes: Sequence[int]) -> CodeChoice | None:
            """How the code after these is chosen; None if they fill the second."""
            if len(codes) == CODES_A_UNIT:
                return None
            recent, draw = tuple(codes[-sampling.CODE_WINDOW :]), float(numbers[len(codes)])
            return CodeChoice(recent, draw, may_end=may_end)

        rows = tts.opening(self.spoken)  # (text + 1, hidden)
        known = self._known_codes(length + len(rows), choice)
        for step in range(CODES_A_UNIT + 1):
            if self._cut_at("tts", step):
                break
            answer: CodeLogits
            asked = choice(self.codes)
            if known is None or not step:
                answer = yield Speak(slot=slot, start=length, rows=rows, choice=asked)
            else:
                answer = yield from known.ask(self.codes[-1])
            length += len(rows)
            code = tts.config.eos if asked is None else self._choose_code(answer, asked)
            if code == tts.config.eos:
                break
            self.codes.append(code)
            rows = tts.code(code)  # (1, hidden)
        self.state = self.state.but(speech=attrs.evolve(speech, length=length))

    def _known_codes(
        self, start: int, choice: Callable[[Sequence[int]], CodeChoice | None]
    ) -> KnownIds | None:
        """The codes that it is known to feed."""
        if self.past is None:
            return None
        codes, tts, slot = self.past.codec_ids, self.setting.parts.tts, self.setting.slot

        def work(at: int) -> Speak:
            rows = tts.code(codes[at])
            return Speak(slot=slot, start=start + at, rows=rows, choice=choice(codes[: at + 1]))

        return KnownIds(codes, work, CODES_A_UNIT)

    def _choose_code(self, answer: CodeLogits, choice: CodeChoice) -> int:
        """Choose the next code, or take the recorded one."""
        eos = self.setting.parts.tts.config.eos
        own = answer.choose(choice, eos)
        if self.teacher is None:
            return own
        chunk, draw, may_end = choice.chunk, choice.draw, choice.may_end

        def gap_to(wanted: int) -> tuple[float | None, float | None]:
            logits = answer.numbers()
            return sampling.code_gap(
                logits, chunk, draw, eos, may_end=may_end, own=own, wanted=wanted
            )

        return self.teacher.code(len(self.codes), own, gap_to)

    def _voice(self, *, last: bool) -> Steps[None]:
        if self._cut_at("token2wav", 0):
            return
        setting, speech = self.setting, self.state.speech
        assert setting.vocoder is not None
        silence = (setting.vocoder.silent_code,) * LOOKAHEAD
        vocoder_buffer = speech.vocoder_buffer or VocoderBuffer(buffer=silence)
        key = f"{setting.opening.seed}/{self.unit.index}"
        spoken = yield from vocoder_buffer.sound(self.codes, setting.voice, key, last=last)
        assert spoken is not None  # A unit is not cut between portions.
        self.sound, vocoder_buffer = spoken
        self.state = self.state.but(speech=attrs.evolve(speech, vocoder_buffer=vocoder_buffer))

    def _result(self, tracing: Future[Trace], *, is_listen: bool, began: int) -> UnitResult:
        trace = tracing.result()
        spent = {stage: ns // 1000 for stage, ns in self.spent_ns.items()}
        wall = (time.perf_counter_ns() - began) // 1000
        slices = sum(len(picture) for picture in self.pictures)
        sound = np.concatenate(self.sound) if self.sound else np.zeros(0)
        return UnitResult(
            index=self.unit.index,
            is_listen=is_listen,
            text=self._text(),
            pcm=sound.astype("<f4").tobytes(),
            end_of_turn=self._ended,
            kv_length=self.state.length,
            decided_ids=tuple(self.decided),
            fed_ids=tuple(self.fed),
            codec_ids=tuple(self.codes),
            cut=self.cut,
            input_hash=input_hash(self.unit),
            logits_hash=trace.digest,
            margin=trace.margin,
            vision_slices=slices,
            vision_tokens=self.setting.parts.config.vision.queries * slices,
            costs=Costs(
                prefill_us=spent["prefill"],
                generate_us=wall - spent["prefill"],
                llm_us=spent["llm"],
                tts_us=spent.get("tts", 0),
                token2wav_us=spent.get("token2wav", 0),
                wall_us=wall,
            ),
        )
