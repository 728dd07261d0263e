"""The embedded model: our own modules for the MiniCPM-o architecture.

`DuplexModel.load(folder)` gives a model, `DuplexModel.open` a blocking `ModelSession`; the async
backend around them (`threaded.py`) runs each call in a thread.
"""

from .model import DuplexModel
from .session import ModelSession

__all__ = ["DuplexModel", "ModelSession"]
