"""The settings of a server's address, its model and what it is given to serve with."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import attrs

from .bounds import DEFAULT_PORT, DEVICES, DTYPES
from .declaration import setting
from .values import TEXTS_MAX

_ADDRESS: Final = "Address and model"


@attrs.frozen(kw_only=True)
class ModelSettings:
    """Where a server listens, what it serves, and where that runs."""

    host: str = setting("127.0.0.1", "Address to listen on.", _ADDRESS)
    port: int = setting(
        DEFAULT_PORT,
        "Port for WebSockets and HTTP; 0 takes a free one and prints it.",
        _ADDRESS,
        low=0,
        high=65_535,
    )
    model: str = setting(
        "tiny",
        "tiny: the embedded trained model. scripted: plays a fixed script, hears nothing. "
        "llama_omni:ws://HOST:PORT: a llama.cpp-omni server, one session or turn of chat at a "
        "time. Otherwise the folder of a MiniCPM-o checkpoint: config.json, tokenizer.json, "
        "safetensors, and assets/token2wav for its voice. `antiphon doctor --model FOLDER` says "
        "whether it fits.",
        _ADDRESS,
    )
    transcriber: str | None = setting(
        None,
        "A second model, which writes down what users say: for captions, recordings and clients "
        "that ask for it. Named as in --model; it must transcribe, and has a slot for each "
        "session.",
        _ADDRESS,
        unset="it is not written down",
    )
    detector: Literal["energy", "silero"] = setting(
        "energy",
        "What finds the speech of users who may interrupt: energy, by loudness; silero, by a "
        "trained model (antiphon[vad]), which takes music and coughs for speech far less often.",
        _ADDRESS,
    )
    barge_in: bool = setting(
        False,
        "Have the user's speech stop the model's, in every duplex dialect; openai has a setting of "
        "its own for that, turn_detection. Without it a client stops the model by force_listen.",
        _ADDRESS,
    )
    workers: tuple[str, ...] = setting(
        (),
        "A further model that can take any session of the first, named as in --model.",
        _ADDRESS,
        flag="--worker",
    )
    isolate: bool = setting(
        False,
        "Run each model in a process of its own, one on each GPU: the server outlives it.",
        _ADDRESS,
    )
    worker_addresses: tuple[str, ...] = setting(
        (),
        "Address of an `antiphon worker` that holds the model: unix:PATH or tcp:HOST:PORT.",
        _ADDRESS,
        flag="--worker-address",
    )
    placement: Literal["auto", "ray"] = setting(
        "auto",
        "auto: in the server's process, or where isolate and worker_addresses say. ray: on the "
        "GPUs of a Ray cluster, a worker on each.",
        _ADDRESS,
    )
    ray_address: str = setting(
        "auto",
        "The Ray cluster: auto, the one that this machine belongs to; or the HOST:PORT of its "
        "head.",
        _ADDRESS,
    )
    workers_wanted: int = setting(
        1,
        "Workers to start on the Ray cluster; with workers_max, the fewest.",
        _ADDRESS,
        low=1,
        high=TEXTS_MAX,
    )
    workers_max: int | None = setting(
        None,
        "The most workers on the Ray cluster: there are as many as the load asks for.",
        _ADDRESS,
        low=1,
        high=TEXTS_MAX,
        unset="workers_wanted",
    )
    worker_token_file: Path | None = setting(
        None, "File of the token that workers share with their servers.", _ADDRESS
    )
    worker_ca: Path | None = setting(
        None,
        "Certificates of the authority that workers' certificates are from, PEM.",
        _ADDRESS,
        unset="the system's",
    )
    slots: int | None = setting(
        None,
        "Sessions at once; their memory is allocated at the start.",
        _ADDRESS,
        low=1,
        high=1024,
        unset="8 for tiny; for a folder as many as fit into memory, at most 64",
    )
    device: str | None = setting(
        None,
        "Where the model computes.",
        _ADDRESS,
        choices=DEVICES,
        unset="cpu for tiny; for a folder cuda if present",
    )
    dtype: str | None = setting(
        None,
        "Format of weights and caches.",
        _ADDRESS,
        choices=DTYPES,
        unset="fp32 on cpu, bf16 on cuda",
    )
    deterministic: bool = setting(
        False,
        "Give a session the same bytes whatever other sessions run, or do not start: then its log "
        "can be replayed with the model. On cpu this always holds; on cuda fewer sessions fit.",
        _ADDRESS,
    )
    served_model_names: tuple[str, ...] = setting(
        (),
        "A further name by which clients of mode=transcription may choose the model.",
        _ADDRESS,
        flag="--served-model-name",
    )
    voices: Path | None = setting(
        None,
        "Folder of WAV files that clients may name as reference audio, each by its name without "
        ".wav.",
        _ADDRESS,
    )
    default_voice: str | None = setting(
        None, "Name of the voice that /api/default_ref_audio gives to pages.", _ADDRESS
    )
    static: Path | None = setting(
        None, "Folder of web pages; every file in it is public, also with keys.", _ADDRESS
    )
