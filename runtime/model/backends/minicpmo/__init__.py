"""MiniCPM-o 4.5 in modules of our own, in the order in which to read them.

| file | has |
|---|---|
| `unit.py`, `slot_layout.py` | one second of a session, from top to bottom; its layout with tools |
| `state.py`, `session.py` | a session's state, and its calls in their order |
| `chat.py`, `chat_prompt.py` | a turn of chat, and its speech |
| `anchor.py` | a streaming request, and transcription, which is one for each utterance |
| `work.py`, `runner.py` | what these request, and how requests are computed |
| `tokens.py`, `sampling.py`, `logits.py` | text and ids, and how the next id is chosen |
| `audio.py`, `vision.py` | sound and pictures to embeddings |
| `vocoder.py`, `voices.py` | codes to sound: of `tiny`, of a checkpoint |
| `decoder.py`, `attention.py` | the language model and the speech decoder over all slots |
| `batched.py`, `device.py`, `kernels_triton.py` | many sessions on a CPU or a GPU |
| `config.py`, `checkpoint.py`, `quantized.py`, `model.py` | a checkpoint, loaded |
"""
