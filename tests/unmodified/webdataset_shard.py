"""Reads a shard by the WebDataset library, and says what each sample has: one line of JSON each."""

from __future__ import annotations

import hashlib
import io
import json
import sys

import soundfile
import webdataset


def main() -> None:
    """Read the shard that is named."""
    for sample in webdataset.WebDataset(sys.argv[1], shardshuffle=False).decode():
        body = {name: value for name, value in sample.items() if not name.startswith("__")}
        told = {"key": sample["__key__"], "json": body.pop("json"), "files": {}}
        for name, data in sorted(body.items()):
            told["files"][name] = hashlib.blake2b(data).hexdigest()
            if name.endswith(".wav"):
                samples, rate_hz = soundfile.read(io.BytesIO(data))
                told[name] = [len(samples), rate_hz]
        print(json.dumps(told))


if __name__ == "__main__":
    main()
