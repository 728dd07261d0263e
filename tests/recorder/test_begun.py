"""A log that is begun in another thread than the recorder's, while that one writes others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from recorder.repair import verify
from recorder.write.logfile import Compressor
from recorder.write.writer import Recorder
from tests.recorder.test_samples import SESSION, record

pytestmark = pytest.mark.anyio


async def test_a_file_begun_in_another_thread_has_a_compressor_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork was written while other sessions were: zstd broke, and the server with it."""
    threads = dict[int, set[int]]()
    compress = Compressor.steps

    def steps(self: Compressor, *args: Any, **kwargs: Any) -> Any:
        threads.setdefault(id(self), set()).add(threading.get_ident())
        return compress(self, *args, **kwargs)

    monkeypatch.setattr(Compressor, "steps", steps)
    with Recorder() as recorder:
        other = recorder.open(tmp_path / "other.session.zst", SESSION, at_ns=0)
        await other.written(0)
        file = recorder.file(tmp_path / "fork.session.zst")
        await anyio.to_thread.run_sync(file.create)
        list(file.write([record("session", 0), record("event", 1)]))
        fork = recorder.go_on(file, 2)
        fork.append(record("event", 2), urgent=True)
        await fork.written(2)
    assert len(set.union(*threads.values())) == 2
    assert [len(its) for its in threads.values()] == [1, 1]
    assert verify(tmp_path / "fork.session.zst").state == "open"
