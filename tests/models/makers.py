"""What the makers' own package does with tools in duplex, as it was recorded.

`fixtures/duplex_tools.json.gz` was made by `minicpm-o5-sdk` 0.0.6 (MIT, ModelBest) of texts of
ours; its `about` says how each section was made. Where the package is installed (the extra
`duplex-tools`), its tokenizer and its wording of the prompt are compared too.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

from tokenizers import Tokenizer

from protocol.values.model import Tool
from runtime.model.backends.minicpmo.slot_layout import NEW, OLDER, Policy, SlotLayout

Target = Literal["o45_fc", "o5"]
TARGETS: Final[tuple[Target, ...]] = ("o45_fc", "o5")
PACKAGE: Final = "minicpm_o5_sdk"
FILE: Final = Path(__file__).parents[2] / "fixtures" / "duplex_tools.json.gz"

TOOLS: Final = {
    tool.name: tool
    for tool in (
        Tool(name="clock", description="Tells the hour."),
        Tool(
            name="tide",
            description="Height of the tide in a harbour.",
            parameters='{"type": "object", "properties": {"harbour": {"type": "string"}, '
            '"hours": {"type": "integer"}}, "required": ["harbour"]}',
        ),
        Tool(
            name="note",
            parameters='{"type": "object", "properties": {"text": {"type": "string"}, '
            '"tags": {"type": "array", "items": {"type": "string"}}, '
            '"done": {"type": ["boolean", "null"]}, "weight": {"type": "number"}, '
            '"where": {"type": "object", "properties": {"x": {"type": "integer"}}}}}',
        ),
    )
}
"""The tools of the recorded sessions."""


@cache
def recorded() -> dict[str, Any]:
    """The recorded sections."""
    made: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return made


NAMES: Final = {"<|spoken_slot_eos|>": "<|chunk_eos|>", "<|spoken_turn_eos|>": "<|turn_eos|>"}
"""The package's names of tokens to those in tokenizers."""


def ids(target: Target) -> dict[str, int]:
    """The ids of the layout's tokens, by name."""
    table = recorded()["special_tokens"].values()
    found = {NAMES.get(row["text"], row["text"]): row[target] for row in table}
    return {name: found[name] for name in (*NEW, *OLDER)}


def placeholders(target: Target) -> dict[str, int]:
    """The ids that stand for embeddings."""
    table = recorded()["special_tokens"]
    return {kind: table[f"{kind}_placeholder"][target] for kind in ("audio", "image")}


@cache
def texts(target: Target) -> dict[str, tuple[int, ...]]:
    """The ids of the texts that were recorded with theirs."""
    made = recorded()
    known = {"": (), "system\n": tuple(made["prompts"][0][target][1:3])}
    known |= {case["text"]: tuple(case[target]) for case in made["results"]}
    known |= {case["text"]: tuple(case[target]["ids"]) for case in made["safe_text"]}
    for scenario in made["scenarios"].values():
        for unit in scenario[target]["units"]:
            known |= dict(zip(_event_texts(unit), _runs(unit["ids"], target), strict=False))
    return known


def _event_texts(unit: dict[str, Any]) -> list[str]:
    return [text for _, *event in unit.get("events", ()) for text in event]


def _runs(found: Sequence[int], target: Target) -> Iterator[tuple[int, ...]]:
    """The ordinary ids between two of the layout's, from the slot of events on."""
    own = ids(target)
    if own["<input_event_slot>"] not in found:
        return
    slot = found[found.index(own["<input_event_slot>"]) :]
    for is_control, run in groupby(slot, key=set(own.values()).__contains__):
        if not is_control:
            yield tuple(run)


def is_installed() -> bool:
    """Whether the package can be compared with."""
    return find_spec(PACKAGE) is not None


def encoder(target: Target) -> Callable[[str], Sequence[int]]:
    """The package's tokenizer, where it is installed; else what was recorded."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return lambda text: texts(target)[text]
    folder = Path(spec.origin).parent / "tokenizers" / "base_tokenizers" / f"qwen2_{target}"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def slots(target: Target, policy: Policy, encode: Callable[[str], Sequence[int]]) -> SlotLayout:
    """The layout of one of the package's tokenizers."""
    own = ids(target)
    return SlotLayout(
        ids=own,
        encode=encode,
        decode=lambda some: "".join(f"[{index}]" for index in some),
        control=frozenset(own.values()),
        policy=policy,
    )
