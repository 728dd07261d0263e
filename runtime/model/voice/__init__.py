"""The published vocoder: speech codes to 24 kHz sound, by our own modules.

`vocoder.py` has a turn, what it keeps and its chunks, over `encoder.py`, `flow.py` and `hift.py`;
`reference.py` what a voice is made of, `config.py` and `checkpoint.py` the files.
`runtime/model/backends/minicpmo/voices.py` puts it behind the interface of all vocoders.
"""
