"""What happens to a simulated server, drawn from one number.

`draw(seed)` decides all of it beforehand: the operator's settings, the clients and when they come,
what goes wrong with their connections, the model and the disk, and what the operator does.
Many seeds are calm in some respect, so that what a fault hides is seen there.
"""

from __future__ import annotations

from random import Random
from typing import Any, Final, get_args

import attrs

from protocol.values.events import PIECES
from protocol.values.limits import Mode
from protocol.values.model import DuplexConfig
from recorder.write.writer import RecorderPolicy
from tests.simulation.simulated_backend import ModelPlan
from tests.simulation.simulated_client import Character, ClientPlan
from tests.simulation.simulated_disk import DiskPlan
from tests.simulation.simulated_socket import Accident, LinkPlan, Trap
from tests.simulation.simulated_way import How, Visit

KINDS: Final[tuple[tuple[str, Mode], ...]] = (
    ("realtime", "video"),
    ("realtime", "audio"),
    ("realtime", "chat"),
    ("realtime", "chat"),
    ("duplex-v1", "video"),
    ("duplex-v1", "audio"),
    ("legacy-duplex", "audio"),
    ("legacy-chat", "chat"),
    ("transcription", "transcription"),
)
"""Every dialect with every mode that it has, but for the second name of one (`_client`)."""
CHARACTERS: Final[tuple[Character, ...]] = (
    *("good", "good", "good", "good", "slow", "hasty", "forcing", "forcing", "garbage"),
    *("silent", "idle", "pausing", "deaf", "flooding"),
)
ACCIDENTS: Final[tuple[Accident, ...]] = get_args(Accident)
HOWS: Final[tuple[How, ...]] = ("alone", *get_args(How))
CALLS_OF_A_SOCKET: Final = 40
"""Of the server's, in a session: at one of so many its connection breaks."""
CROWD_EVERY: Final = 50
"""One seed of so many has hundreds of sessions, the others some dozens."""


@attrs.frozen(kw_only=True)
class Plan:
    """One simulation.

    Attributes:
        seed: the number.
        settings: of `runtime.settings.settings.Settings`.
        recorder: how logs are kept; None: they are not.
        model: what goes wrong with the model.
        disk: what goes wrong with the disk.
        clients: who comes, and when.
        deletions_s: moments at which the operator deletes a ticket.
        drain_s: when the server is drained; None: not before the end.
        warning_s: how long before that it admits nobody any more, and says so; 0: not at all.
        storm_s: until then faults happen.
    """

    seed: int
    settings: dict[str, Any]
    recorder: RecorderPolicy | None
    model: ModelPlan
    disk: DiskPlan
    clients: tuple[ClientPlan, ...]
    deletions_s: tuple[float, ...]
    drain_s: float | None
    warning_s: int
    storm_s: float


def draw(seed: int) -> Plan:
    """Draw a simulation."""
    dice = Random(f"simulation/{seed}")
    crowd = seed % CROWD_EVERY == CROWD_EVERY - 1
    count = dice.randrange(150, 250) if crowd else dice.randrange(8, 32)
    storm_s = count * (0.2 if crowd else dice.choice((0.2, 1.0, 2.0, 3.0)))
    plan = Plan(
        seed=seed,
        settings=_settings(dice),
        recorder=_recorder(dice),
        model=_model(dice, storm_s),
        disk=_disk(dice, storm_s),
        clients=tuple(_client(dice, number, storm_s, crowd) for number in range(count)),
        deletions_s=_moments(dice, storm_s, dice.choice((0, 0, 5))),
        drain_s=dice.random() * storm_s if dice.random() < 0.2 else None,
        warning_s=dice.choice((0, 2, 10)),
        storm_s=storm_s,
    )
    return _with_omni(_with_barge_in(_with_returns(_with_losses(_with_pieces(plan)))))


def _moments(dice: Random, until_s: float, count: int) -> tuple[float, ...]:
    return tuple(sorted(dice.random() * until_s for _ in range(count)))


def _settings(dice: Random) -> dict[str, Any]:
    return {
        "limit_video_s": dice.choice((6, 12, 30)),
        "limit_audio_s": dice.choice((6, 15, 40)),
        "limit_transcription_s": 25,
        "queue_max": dice.choice((0, 2, 8, 64, 64)),
        "init_wait_s": dice.choice((1, 3, 8)),
        "cleanup_wait_s": dice.choice((1, 3, 6)),
        "idle_s": dice.choice((2, 5, 10)),
        "pause_s": dice.choice((1, 3, 8)),
        "chats_max": dice.choice((1, 3, 16, 256)),
        "stall_s": dice.choice((2, 10)),
        "on_recording_failure": dice.choice(("continue", "continue", "close")),
    }


def _recorder(dice: Random) -> RecorderPolicy | None:
    if dice.random() < 0.1:
        return None
    small = dice.random() < 0.2  # so that a slow disk is soon a full backlog
    return RecorderPolicy(
        durability=dice.choice(("interval", "none", "unit")),
        session_backlog_bytes_max=(1 if small else 64) << 17,
        total_backlog_bytes_max=(1 if small else 64) << 19,
    )


def _model(dice: Random, storm_s: float) -> ModelPlan:
    workers = dice.choice((1, 1, 1, 2))
    slots = dice.choice((1, 2, 2, 3, 4, 8))
    if dice.random() < 0.3:
        return ModelPlan(slots=slots, workers=workers)
    often = dice.choice((10, 40, 120))
    hangs = dice.choice((0, 0, 5, 25))
    return ModelPlan(
        slots=slots,
        workers=workers,
        replaces=dice.random() < 0.7,
        load_fails=dice.choice((0, 300)),
        fails=often,
        broken=dice.choice((0, often)),
        gone=dice.choice((0, often // 2)),
        hangs=hangs,
        late_s=dice.choice((None, 4.0, 12.0, 40.0)),
        full=dice.choice((0, 0, 20)),
        slow=dice.choice((0, 50, 300)),
        release_fails=dice.choice((0, 0, 10)) if hangs else 0,
        release_s=dice.choice((0.0, 0.01, 0.5, 2.0)),
        opening_s=dice.choice((0.0, 0.2, 3.0)),
        can_rollback=dice.random() < 0.8,
        crashes_s=_moments(dice, storm_s, dice.choice((0, 0, 0, 1, 3))),
        down_s=dice.random() * 5,
    )


def _with_pieces(plan: Plan) -> Plan:
    """Have some clients of sound speak OpenAI's dialects; other dice than the rest's."""
    dice = Random(f"pieces/{plan.seed}")
    if dice.random() < 0.4:
        return plan
    settings = {"limit_live_s": dice.choice((12, 15, 40))}
    clients = tuple(
        _in_pieces(dice, it) if it.mode == "audio" and dice.random() < 0.6 else it
        for it in plan.clients
    )
    return attrs.evolve(plan, settings=plan.settings | settings, clients=clients)


def _with_barge_in(plan: Plan) -> Plan:
    """Have users interrupt, by the operator's will; other dice than the rest's."""
    if Random(f"barge-in/{plan.seed}").random() < 0.7:
        return plan
    return attrs.evolve(plan, settings=plan.settings | {"barge_in": True})


def _with_omni(plan: Plan) -> Plan:
    """Have some clients of sound that stay away once they are gone speak `vllm-omni`."""
    dice = Random(f"omni/{plan.seed}")
    if dice.random() < 0.7:
        return plan
    clients = tuple(
        _in_omni(it) if it.mode == "audio" and not it.resumable and dice.random() < 0.4 else it
        for it in plan.clients
    )
    return attrs.evolve(plan, clients=clients)


def _in_omni(client: ClientPlan) -> ClientPlan:
    if client.endpoint in PIECES:
        return client
    return attrs.evolve(
        client,
        dialect="vllm-omni",
        character="good" if client.character == "pausing" else client.character,
        config=DuplexConfig(),
        has_voice=False,
    )


def _in_pieces(dice: Random, client: ClientPlan) -> ClientPlan:
    return attrs.evolve(
        client,
        dialect=dice.choice(("live", "openai")),
        character="good" if client.character == "pausing" else client.character,
        config=DuplexConfig(),
        has_voice=False,
    )


def _with_losses(plan: Plan) -> Plan:
    """Have workers die and be drained, in some seeds several within two seconds.

    Each that dies is replaced. In half of the seeds the disk is sound, so that sessions can move;
    in some most clients interrupt. Other dice than the rest's: all else is the same.
    """
    dice, storm_s = Random(f"losses/{plan.seed}"), plan.storm_s
    if dice.random() < 0.3:
        return plan
    deaths_s = _moments(dice, storm_s, dice.choice((0, 1, 3)))
    if dice.random() < 0.3:
        at_s = dice.random() * storm_s
        deaths_s += tuple(at_s + dice.random() * 2 for _ in range(dice.randrange(2, 5)))
    interrupts = dice.random() < 0.25
    model = attrs.evolve(
        plan.model,
        workers=dice.choice((1, 2, 2, 3)),
        replaces=True,
        load_s=dice.choice((3.0, 3.0, 3.0, 30.0)),
        gone=max(plan.model.gone, dice.choice((0, 10, 40))),
        killed_by_cuts=300 if interrupts else 0,
        deaths_s=deaths_s,
        drains_s=_moments(dice, storm_s, dice.choice((0, 0, 1, 2))),
    )
    how = Random(f"rebuild/{plan.seed}").choice(("auto", "exact", "fast"))
    return attrs.evolve(
        plan,
        settings=plan.settings | {"rebuild": how},
        model=model,
        disk=DiskPlan() if dice.random() < 0.5 else plan.disk,
        clients=tuple(map(_interrupting, plan.clients)) if interrupts else plan.clients,
    )


def _with_returns(plan: Plan) -> Plan:
    """Have clients lose their connections and come back.

    Other dice than the rest's: in seeds without them all else is the same.
    """
    dice = Random(f"returns/{plan.seed}")
    if dice.random() < 0.4:
        return plan
    detach_s = dice.choice((1, 3, 6))
    resume_s = detach_s + dice.choice((2, 8, 15))
    share = dice.choice((0.3, 0.7))
    clients = (
        _returning(dice, it, detach_s, resume_s) if dice.random() < share else it
        for it in plan.clients
    )
    settings = {
        "detach_s": detach_s,
        "resume_s": resume_s,
        "detached_max": dice.choice((2, 1024, 1024)),
    }
    return attrs.evolve(plan, settings=plan.settings | settings, clients=tuple(clients))


def _returning(dice: Random, client: ClientPlan, detach_s: int, resume_s: int) -> ClientPlan:
    """Let a client come back: at once, in time, after its slot is given back, or too late."""
    visits = []
    for _ in range(dice.randrange(1, 5)):
        away_s = (0.0, dice.random(), detach_s + 1.5 * dice.random(), resume_s + dice.random())
        link = _link(dice, client.character)
        trap = link.trap  # a server that cancels a connection's task is one that ends
        if dice.random() < 0.4:
            trap = Trap(number=dice.randrange(1, 7), accident="reset")  # amid the return
        visits.append(
            Visit(
                away_s=dice.choices(away_s, (3, 4, 4, 1))[0],
                how=dice.choice(HOWS),
                repeats=dice.choice((0, 0, 1, 5)),
                lasts_s=dice.random() ** 2 * 12 if dice.random() < 0.8 else float("inf"),
                link=attrs.evolve(link, trap=_no_cancel(trap)),
            )
        )
    return attrs.evolve(
        client,
        resumable=True,
        lasts_s=dice.random() ** 2 * 8,
        visits=tuple(visits),
        link=attrs.evolve(client.link, trap=_no_cancel(client.link.trap)),
    )


def _no_cancel(trap: Trap | None) -> Trap | None:
    is_cancel = trap is not None and trap.accident == "cancel"
    return attrs.evolve(trap, accident="reset") if trap is not None and is_cancel else trap


def _interrupting(client: ClientPlan) -> ClientPlan:
    character = "forcing" if client.character in {"good", "slow"} else client.character
    return attrs.evolve(client, character=character)


def without_losses(plan: Plan) -> Plan:
    """The same simulation, in which no worker is lost or drained."""
    model = attrs.evolve(
        plan.model, gone=0, killed_by_cuts=0, crashes_s=(), deaths_s=(), drains_s=()
    )
    return attrs.evolve(plan, model=model)


def _disk(dice: Random, storm_s: float) -> DiskPlan:
    if dice.random() < 0.4:
        return DiskPlan(short_writes=dice.choice((0, 300)))
    begins_s = _moments(dice, storm_s, dice.choice((0, 0, 1, 2)))
    return DiskPlan(
        capacity_bytes=dice.choice((1 << 40, 1 << 40, 1 << 14, 1 << 18)),
        create_fails=dice.choice((0, 0, 100)),
        write_fails=dice.choice((0, 0, 5, 50)),
        short_writes=dice.choice((0, 300)),
        sync_fails=dice.choice((0, 0, 50)),
        slow=tuple((at_s, at_s + dice.random() * 8) for at_s in begins_s),
    )


def _client(dice: Random, number: int, storm_s: float, crowd: bool) -> ClientPlan:
    dialect, mode = dice.choice(KINDS)
    if dialect == "transcription" and number % 2:
        dialect = "transcription-responses"  # of no draw's own: all else stays as it was drawn
    elif dialect == "transcription" and number % 4:
        dialect = "openai-transcription"
    character = dice.choice(CHARACTERS)
    if character == "pausing" and dialect != "legacy-duplex":
        character = "good"
    return ClientPlan(
        number=number,
        arrives_s=dice.random() * storm_s * 0.8,
        dialect=dialect,
        mode=mode,
        character=character,
        rounds=dice.randrange(1, 3 if crowd else 9) + 8 * (character == "deaf"),
        leaves_s=dice.random() ** 2 * 20 if dice.random() < 0.3 else None,
        config=_config(dice, dialect),
        has_voice=dice.random() < 0.2,
        has_frames=mode not in {"audio", "transcription"} and dice.random() < 0.2,
        link=_link(dice, character),
    )


def _config(dice: Random, dialect: str) -> DuplexConfig:
    if dialect == "duplex-v1":  # it has no settings
        return DuplexConfig()
    return DuplexConfig(
        generate_audio=dice.random() < 0.8,
        force_listen_count=dice.randrange(100),
        temperature=dice.randrange(200) / 100,
        top_k=dice.randrange(1, 1000),
        deferred_finalize=dialect != "legacy-duplex" or dice.random() < 0.5,
    )


def _link(dice: Random, character: Character) -> LinkPlan:
    base_s = dice.choice((0.0, 0.01, 0.1))
    lost = dice.random() < 0.2
    trap = None
    if dice.random() < 0.25:
        number = 1 + int(dice.random() ** 2 * CALLS_OF_A_SOCKET)
        trap = Trap(number=number, accident=dice.choice(ACCIDENTS))
    return LinkPlan(
        latency_s=tuple(
            base_s * (0.5 + dice.random()) + (dice.random() if lost and dice.random() < 0.1 else 0)
            for _ in range(8)
        ),
        buffer_bytes={"deaf": 300, "slow": 4_000}.get(character, 1 << 20),
        answers_close=dice.random() < 0.9,
        stall_s=dice.choice((1.0, float("inf"))),
        trap=trap,
    )
