"""Runs of the fuzzer: cases that Hypothesis draws, or broken bytes, until a budget is spent.

- Cases are drawn in rounds, each with its own seed, made from the run's. Only findings are kept: no
  database, and no memory that grows. Later rounds skip known findings.
- Broken bytes are for the parsers of messages and of session logs. Such a parser may raise only its
  documented errors, in bounded time and memory. The inputs are valid bytes with pieces cut,
  doubled, swapped or overwritten, and bits flipped. A log's checksums would hide its payloads, so
  half of the logs are broken within a payload and sealed again.
- Findings are reduced, and kept as files.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import attrs
import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from protocol.values.errors import FieldError, FrameError, RemoteProtocolError
from protocol.wire.codec import Context, parse_frame
from protocol.wire.dialects import DIALECTS, MODES_OF, OPENING
from recorder.format.format import RecorderError
from recorder.read.reader import LogReader
from recorder.read.scan import Block, BytesSource, Scanner
from recorder.repair import verify
from recorder.write.logfile import Chain, Compressor
from tests.fuzz.case import Case, Finding, Found, Outcome, Step, Tally, described, fill, write_case
from tests.fuzz.drawing import GARBAGE, PIECES, Names, cases
from tests.fuzz.play import FuzzerError, LocalTarget, append_of, init_of, probe_case

# -- runs -----------------------------------------------------------------------------------------

ROUND_EXAMPLES: Final = 200
"""Enough for Hypothesis to vary its draws; few enough to report, and to forget."""
SHRINK_S: Final = 30.0
"""For reducing one finding; then it is small enough to read."""
FINDINGS_MAX: Final = 50
"""A run with so many has done its work."""
SEEDS: Final = 1_000_003
"""Above the rounds of any run, and prime: runs share no seeds."""


class Target(Protocol):
    """Plays cases to a server."""

    @property
    def is_local(self) -> bool:
        """Whether the server is in memory; see `drawing.cases`."""
        ...

    def run(self, case: Case) -> Outcome:
        """Play a case."""
        ...


class _FoundError(Exception):
    """A case has a finding; it makes Hypothesis reduce the case."""


@attrs.frozen(kw_only=True)
class Budget:
    """The end of a run: the bound that is reached first; None for no bound."""

    seconds: float | None = None
    examples: int | None = None

    def is_spent(self, examples: int, elapsed_s: float) -> bool:
        """Whether a bound is reached."""
        is_late = self.seconds is not None and elapsed_s >= self.seconds
        return is_late or (self.examples is not None and examples >= self.examples)


class Campaign:
    """One run over the dialects and modes of `names`; `clock` gives monotonic seconds.

    `on_progress` is called after each case, `on_found` once with each reduced finding.
    """

    def __init__(
        self,
        target: Target,
        names: Names,
        *,
        seed: int,
        budget: Budget,
        clock: Callable[[], float] = time.monotonic,
        on_progress: Callable[[Tally], None] = lambda _: None,
        on_found: Callable[[Found], None] = lambda _: None,
    ) -> None:
        self.tally = Tally()
        self._target = target
        self._strategy = cases(names, is_local=target.is_local)
        self._seed = seed
        self._budget = budget
        self._clock = clock
        self._on_progress = on_progress
        self._on_found = on_found
        self._known: set[Finding] = set()
        self._began_s = clock()

    def run(self) -> Tally:
        """Run until the budget is spent; a `FuzzerError` leaves earlier findings in `tally`."""
        while not self._is_over():
            seed = self._seed * SEEDS + self.tally.rounds
            left = ROUND_EXAMPLES
            if self._budget.examples is not None:
                left = min(left, self._budget.examples - self.tally.examples)
            found = _Round(self, seed, left).run()
            self.tally.rounds += 1
            if found is not None:
                self._known.add(found.finding)
                self.tally.found.append(found)
                self._on_found(found)
            self._progress()
        return self.tally

    def _is_over(self) -> bool:
        is_spent = self._budget.is_spent(self.tally.examples, self._elapsed_s())
        return is_spent or len(self.tally.found) >= FINDINGS_MAX

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s

    def _progress(self) -> None:
        self.tally.elapsed_s = self._elapsed_s()
        self._on_progress(self.tally)


class _Round:
    """One round: it ends with the first new finding, reduced."""

    def __init__(self, campaign: Campaign, seed: int, examples: int) -> None:
        self._of = campaign
        self._seed = seed
        self._examples = examples
        self._sought: Finding | None = None
        self._best: tuple[Case, Outcome] | None = None
        self._shrinks_until_s = 0.0

    def run(self) -> Found | None:
        """Draw the cases; return the finding, if any."""
        try:
            _drawing(self._seed, self._examples, self._of._strategy, self._examine)()
        except (_FoundError, hypothesis.errors.HypothesisException, BaseExceptionGroup):
            if self._best is None:
                raise
        except Exception as error:
            raise FuzzerError(f"{type(error).__name__}: {error}") from error
        if self._best is None or self._sought is None:
            return None
        self._trim()
        case, outcome = self._best
        steady = [self._sought in self._play_again(case).findings for _ in range(2)]
        finding = next(one for one in outcome.findings if one == self._sought)
        return Found(
            finding=finding, case=case, outcome=outcome, seed=self._seed, is_steady=all(steady)
        )

    def _examine(self, case: Case) -> None:
        of = self._of
        if self._sought is None:
            if of._is_over():
                return
            outcome = self._play(case)
            of.tally.count(case, outcome)
            of._progress()
            if not outcome.findings:
                return
            # Later findings of a case are mostly consequences of the first.
            if outcome.findings[0] in of._known:
                of.tally.repeated += 1
                return
            self._sought = outcome.findings[0]
            self._shrinks_until_s = of._clock() + SHRINK_S
        elif of._clock() > self._shrinks_until_s:
            return
        else:
            outcome = self._play(case)
        if self._keep(case, outcome):
            raise _FoundError

    def _keep(self, case: Case, outcome: Outcome) -> bool:
        """Whether a case has the sought finding; keeps the smallest."""
        if self._sought not in outcome.findings:
            return False
        if self._best is None or _size(case) <= _size(self._best[0]):
            self._best = case, outcome
        return True

    def _trim(self) -> None:
        """Leave out steps one by one, while the finding stays."""
        assert self._best is not None
        at = len(self._best[0].steps) - 1
        while at >= 0 and self._of._clock() <= self._shrinks_until_s:
            case = self._best[0]
            if at < len(case.steps):
                steps = case.steps[:at] + case.steps[at + 1 :]
                less = attrs.evolve(case, steps=steps)
                self._keep(less, self._play_again(less))
            at -= 1

    def _play(self, case: Case) -> Outcome:
        self._of.tally.plays += 1
        return self._of._target.run(case)

    def _play_again(self, case: Case) -> Outcome:
        self._of.tally.plays += 1
        return play_again(self._of._target, case)


def _size(case: Case) -> tuple[int, int, int]:
    """A case's size for its reader: messages, steps, text."""
    return (case.messages, len(case.steps), sum(len(repr(step)) for step in case.steps))


def _drawing(
    seed: int, examples: int, strategy: st.SearchStrategy[Case], examine: Callable[[Case], None]
) -> Callable[[], None]:
    """Make a Hypothesis test to be run by hand."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=max(1, examples),
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @given(strategy)
    def draw(case: Case) -> None:
        examine(case)

    return draw


def play_again(target: Target, case: Case) -> Outcome:
    """Play one case as a round would, with the same random values of Hypothesis."""
    found: list[Outcome] = []
    _drawing(0, 1, st.just(case), lambda drawn: found.append(target.run(drawn)))()
    return found[-1]


def save(found: Found, folder: Path, number: int, facts: dict[str, object]) -> Path:
    """Write a finding's transcript into a folder, made if missing, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:02}-{found.finding.kind}-{found.case.dialect}.jsonl"
    told: tuple[Step, ...] = found.outcome.told or found.case.steps
    more = {"seed": found.seed, "steady": found.is_steady, **facts}
    write_case(path, found.case, found.finding, told, more)
    return path


# -- broken bytes ---------------------------------------------------------------------------------

KINDS: Final = ("codec", "log")
INPUT_CPU_S_MAX: Final = 5.0
"""A megabyte takes a hundredth; a slower input could be made slower still."""
INPUT_MEMORY_MB_MAX: Final = 700
"""The most that one input may add: a block's limit is 132 MiB, held a few times over."""
CHANGES_MAX: Final = 6
"""To one input: with more, the first one already has it refused."""
SHRINK_TRIES_MAX: Final = 400
"""To reduce one finding."""
BYTES_FINDINGS_MAX: Final = 20
"""Different ones of a run."""


@attrs.define
class Bytewise:
    """The results of a run: the most memory in MB, and the file of each finding by its label."""

    inputs: int = 0
    elapsed_s: float = 0.0
    memory_mb: float = 0.0
    findings: dict[str, Path] = attrs.Factory(dict)

    def to_json(self) -> dict[str, Any]:
        """The results as JSON."""
        found = {label: str(path) for label, path in self.findings.items()}
        return {
            "inputs": self.inputs,
            "elapsed_s": round(self.elapsed_s, 3),
            "memory_mb_max": round(self.memory_mb),
            "findings": found,
        }


def fuzz_bytes(
    kind: str, *, seed: int, budget: Budget, out: Path, read: Callable[[bytes], None] | None = None
) -> Bytewise:
    """Break bytes until the budget is spent; an example is one input.

    `kind` is one of `KINDS`; inputs with findings are kept in `out`. An exception of `read`, the
    parser, is a finding.
    """
    dice = random.Random(seed)
    corpus = list(_frames() if kind == "codec" else _logs())
    read = read or (read_frame if kind == "codec" else read_log)
    found, began_s = Bytewise(), time.monotonic()
    while len(found.findings) < BYTES_FINDINGS_MAX:
        if budget.is_spent(found.inputs, time.monotonic() - began_s):
            break
        sound = dice.choice(corpus)
        data = _sealed(sound, dice) if kind == "log" and dice.random() < 0.5 else None
        data = _broken(sound, dice) if data is None else data
        found.inputs += 1
        wrong = _wrong(read, data)
        if wrong and wrong not in found.findings:
            found.findings[wrong] = _save(out, kind, _smaller(read, data, wrong, dice))
    found.elapsed_s = time.monotonic() - began_s
    found.memory_mb = _memory_mb()
    return found


# -- what reads them ------------------------------------------------------------------------------


def read_frame(data: bytes) -> None:
    """Parse bytes as a message, in every dialect and at both ends."""
    try:
        body = parse_frame(data.decode("utf-8", "replace"))
    except FrameError:
        return
    for name, dialect in DIALECTS.items():
        for mode in MODES_OF[name]:
            with suppress(FieldError):
                dialect.parse(dialect.classify(body), body, Context(mode=mode))
            with suppress(RemoteProtocolError):
                dialect.decode(body, mode)
    OPENING.classify(body)


def read_log(data: bytes) -> None:
    """Read and verify bytes as a session log, to the end and past all damage."""
    verify(data)
    with suppress(RecorderError), LogReader(data) as reader:
        for _ in reader:
            pass


def _wrong(read: Callable[[bytes], None], data: bytes) -> str:
    """Read, and return the label of a finding, or empty."""
    began_s, began_mb = time.process_time(), _memory_mb()
    try:
        read(data)
    except Exception as error:
        return _name(error)
    if time.process_time() - began_s > INPUT_CPU_S_MAX:
        return "an input takes too long"
    if _memory_mb() - began_mb > INPUT_MEMORY_MB_MAX:
        return "an input takes too much memory"
    return ""


def _name(error: BaseException) -> str:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = "" if at is None else f" in {at.tb_frame.f_code.co_name}"
    return f"{type(error).__name__}{where}"


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- sound ones -----------------------------------------------------------------------------------


def _frames() -> Iterator[bytes]:
    for name, modes in MODES_OF.items():
        for message in described(name):
            yield from (json.dumps(body).encode() for body in message.examples)
        for mode in modes:
            case = Case(dialect=name, mode=mode, steps=())
            yield json.dumps(fill(init_of(case))).encode()
            yield json.dumps({**append_of(case), "audio": "AAAA"}).encode()
    yield from (text.encode("utf-8", "replace") for text in GARBAGE)


def _logs() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory(prefix="antiphon-fuzz-") as name:
        for dialect, modes in MODES_OF.items():
            folder = Path(name) / dialect
            folder.mkdir()
            case = probe_case(
                Case(dialect=dialect, mode=modes[0], script="speaks", steps=()), with_sound=True
            )
            LocalTarget(record_to=folder).run(case)
            yield from (path.read_bytes() for path in sorted(folder.iterdir()))


# -- broken ones ----------------------------------------------------------------------------------


def _broken(data: bytes, dice: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(dice.randint(1, CHANGES_MAX)):
        at = dice.randrange(len(made) + 1)
        end = min(len(made), at + dice.choice((1, 2, 4, 8, 64, 4096)))
        match dice.randrange(7):
            case 0:
                del made[at:end]
            case 1:
                made[at:at] = made[at:end] * dice.choice((1, 2, 50))
            case 2:
                made[at:end] = dice.randbytes(end - at)
            case 3:
                made[at:end] = dice.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * (end - at)
            case 4 if made:
                made[at % len(made)] ^= 1 << dice.randrange(8)
            case 5:
                made[at:at] = dice.choice(PIECES).encode("utf-8", "replace")
            case 6:
                other = dice.randrange(len(made) + 1)
                made[at:end] = made[other : other + end - at]
    return bytes(made)


def _sealed(data: bytes, dice: random.Random) -> bytes | None:
    """Break the payload of one block of a log and seal all blocks again; None without blocks."""
    blocks = [block for block in Scanner(BytesSource(data)) if isinstance(block, Block)]
    if not blocks:
        return None
    chosen, chain, made = dice.randrange(len(blocks)), Chain(), b""
    for number, block in enumerate(blocks):
        payload = _broken(block.payload, dice) if number == chosen else block.payload
        frame = Compressor().compress([payload or b"\0"], has_samples=False)
        header = attrs.evolve(
            block.header,
            compressed_len=len(frame.data),
            uncompressed_len=frame.payload_bytes,
            payload_crc=zlib.crc32(frame.data),
            is_stuffed=frame.is_stuffed,
        )
        made += chain.link(header, frame)
    return made


def _smaller(read: Callable[[bytes], None], data: bytes, wrong: str, dice: random.Random) -> bytes:
    """Leave out pieces while the finding stays."""
    for _ in range(SHRINK_TRIES_MAX):
        size = max(1, len(data) >> dice.randrange(1, 8))
        at = dice.randrange(max(1, len(data) - size + 1))
        less = data[:at] + data[at + size :]
        if less and _wrong(read, less) == wrong:
            data = less
    return data


def _save(out: Path, kind: str, data: bytes) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{kind}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    return path
