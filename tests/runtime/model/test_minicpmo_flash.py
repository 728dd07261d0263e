"""Flash attention over rows of several sessions, held to each row's attention by itself."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.model.backends.minicpmo.attention import KvSlots, Row, SlotCache, SpanCache, spans_of
from tests.models.flash import flash_on_cpu
from tests.project.sampling import sample
from tests.runtime.model.test_minicpmo_steps import assert_near, noise


@given(
    window=st.sampled_from([None, 1, 7, 20]),
    causal=st.booleans(),
    groups=st.sampled_from([1, 3]),
    count=st.integers(1, 12),
    starts=st.dictionaries(st.integers(0, 3), st.integers(0, 20), min_size=1),
)
@settings(max_examples=sample(80, 30))
def test_all_rows_at_once_see_what_each_sees_by_itself(
    window: int | None, causal: bool, groups: int, count: int, starts: dict[int, int]
) -> None:
    """A session would hear another's, or what is not there yet (B8)."""
    if not causal:
        window = None  # The audio encoder has none.
    capacity, heads = 32, 2
    stores = [
        KvSlots(layers=2, slots=4, heads=heads, capacity=capacity, width=8, window=window)
        for _ in range(2)
    ]
    for store in stores:
        store.keys.copy_(noise(*store.keys.shape, seed=1))
        store.values.copy_(noise(*store.values.shape, seed=2))
    rows = [Row(slot=slot, start=start) for slot, start in starts.items()]
    query = noise(len(rows), groups * heads, count, 8, seed=3)
    new = [noise(len(rows), heads, count, 8, seed=seed) for seed in (4, 5)]
    caches = (
        SlotCache(stores[0], rows, count, groups, causal=causal),
        SpanCache(stores[1], spans_of(stores[1], rows, count, causal=causal)),
    )
    outs = []
    with flash_on_cpu():
        for cache in caches:
            seen, _ = cache.update(*new, 1)
            outs.append(seen.attend(query, 0.5))
    assert_near(*outs)
    assert torch.equal(stores[0].keys, stores[1].keys)
    assert torch.equal(stores[0].values, stores[1].values)
    for slot in range(4):  # Each wipes as far as it wrote.
        for store in stores:
            store.wipe(slot)
        assert torch.equal(stores[0].keys, stores[1].keys)
