"""The measures of `antiphon eval --mode forced`: what a model decides on a recording's past.

A decision is the first token of a unit that was free to decide: to be silent, or to be heard. Each
is judged on the recorded past, so that one difference has no consequences.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from protocol.values.limits import MS_PER_S
from runtime.measures.measure import HEARD_MS, Measure

from ..rerun.outputs import NEAR_TIE_DRAW_GAP, NEAR_TIE_MARGIN

_HEARD: Final = f"{HEARD_MS / MS_PER_S:g} s"
_OVER: Final = f"Of units in an open turn of the model in which the user speaks for {_HEARD}: "

_share = partial(Measure, kind="ratio", unit="share", modes="forced")

FORCED: Final = (
    Measure(
        name="decisions",
        kind="total",
        unit="count",
        better="",
        modes="forced",
        definition="Units in which the model is free to be silent or to be heard.",
    ),
    _share(
        name="decision_agreement",
        better="higher",
        definition="Share of the decisions, to be silent or to be heard, that are as recorded.",
    ),
    _share(
        name="take_overs_missed",
        better="lower",
        definition=(
            "Share of the units in which the recorded model began to speak, in which this one "
            "decides to listen."
        ),
    ),
    _share(
        name="take_overs_added",
        better="lower",
        definition=(
            "Share of the units outside a turn in which the recorded model listened, in which this "
            "one decides to speak."
        ),
    ),
    _share(
        name="stops_missed",
        better="lower",
        definition=(
            "Share of the units in an open turn whose first recorded token was `turn_eos` or "
            "`listen`, in which this model decides to go on."
        ),
    ),
    _share(
        name="stops_added",
        better="lower",
        definition=(
            "Share of the units in an open turn in which the recorded model went on, in which this "
            "one decides by its first token to stop."
        ),
    ),
    _share(
        name="near_tie_flips",
        better="",
        definition=(
            "Share of the decisions not as recorded that rounding can turn: the two tokens are "
            f"within {NEAR_TIE_MARGIN:g} in logits, or the draw within {NEAR_TIE_DRAW_GAP:g}."
        ),
    ),
    Measure(
        name="silence_margin",
        kind="ratio",
        unit="logits",
        better="",
        modes="forced",
        definition=(
            "Mean of the decisions: the best logit of silence minus the best of all other tokens, "
            "penalties and `listen_prob_scale` included."
        ),
    ),
    _share(
        name="barge_in_stops",
        better="higher",
        definition=f"{_OVER}the share in which this model decides to be silent.",
    ),
    Measure(
        name="barge_in_listen_probability",
        kind="ratio",
        unit="%",
        better="",
        modes="forced",
        definition=f"{_OVER}the mean probability of `listen` as first token.",
    ),
    Measure(
        name="barge_in_end_probability",
        kind="ratio",
        unit="%",
        better="",
        modes="forced",
        definition=f"{_OVER}the mean probability of `turn_eos` as first token.",
    ),
    _share(
        name="logits_otherwise",
        better="",
        definition=(
            "Share of the units whose first logits differ in any bit from the recorded ones: the "
            "weights, the prompt, the precision or the machine is another. Rules of sampling do "
            "not count."
        ),
    ),
    _share(
        name="tokens_otherwise",
        better="lower",
        definition="Share of the tokens for which this model decides otherwise, text included.",
    ),
    _share(
        name="codes_otherwise",
        better="lower",
        definition="Share of the speech codes for which this model decides otherwise.",
    ),
    _share(
        name="sound_otherwise",
        better="lower",
        definition="Share of the spoken units whose sound differs, though made of the same codes.",
    ),
    Measure(
        name="units_elsewhere",
        kind="total",
        unit="count",
        better="lower",
        modes="forced",
        definition=(
            "Units that are not judged: this model did not take a recorded decision, so it was "
            "elsewhere since."
        ),
    ),
)
