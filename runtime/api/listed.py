"""The list of recordings as a key may see it: its pages, and those before and after one."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

import attrs
from starlette.exceptions import HTTPException

from recorder.keep.listing import Wanted, page_of
from recorder.keep.summary import Summary

from ..access.keys import Key


def page_json(
    summaries: Sequence[Summary],
    principal: Key,
    wanted: Wanted,
    *,
    limit: int,
    after: str | None,
) -> dict[str, object]:
    """A page of the recordings that a key may see; `ValueError`: `after` is no page's end."""
    seen = [it for it in summaries if principal.may_see(it.owner)]
    page, following = page_of(seen, wanted, limit=limit, after=after)
    return {"recordings": [attrs.asdict(it) for it in page], "next": following}


def around(summaries: Sequence[Summary], principal: Key, summary: Summary, direction: str) -> str:
    """Find the readable recording before or after another in time, of those that a key may see."""
    own = (-summary.listed_ms, summary.recording_id)
    seen = [
        (-it.listed_ms, it.recording_id)
        for it in summaries
        if principal.may_see(it.owner) and it.state != "unreadable"
    ]
    is_next = direction == "next"
    places = [place for place in seen if (place < own if is_next else place > own)]
    if not places:
        text = f"there is no session {'after' if is_next else 'before'} this one"
        raise HTTPException(HTTPStatus.NOT_FOUND, text)
    return (max(places) if is_next else min(places))[1]
