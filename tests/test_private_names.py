"""Private names of libraries in the product: few, each with its reason, and still there.

A name that begins with an underscore is the library's own business, and may go in any release.
`USED` lists each that the product uses nevertheless, and why no public name serves. The test finds
them in the sources: an import of such a name, an attribute of another object whose name is not
defined in the same file, an attribute of `self` that no source of ours defines, and a method that
overrides a library's.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs
import pytest

from tests.project.syntax import nodes_of

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("antiphon", "protocol", "recorder", "runtime", "replay")
USES_MAX: Final = 10
"""Places that use one: each may break when its library is updated.

Four are of aiortc, which has no public way to bound what a client has it keep.
"""
DOCUMENTED: Final = frozenset({"os._exit", "_replace", "zlib._Decompress"})
"""Public in spite of the underscore: of `os`, of named tuples, and a type's only name."""


@attrs.frozen
class Private:
    """A library's private name: why it is used, and what shows that the library still has it."""

    reason: str
    is_there: Callable[[], bool]


def _websocket() -> Any:
    import trio.testing
    import trio_websocket
    import wsproto

    ours, _theirs = trio.testing.memory_stream_pair()
    codec = wsproto.WSConnection(wsproto.ConnectionType.SERVER)
    return trio_websocket.WebSocketConnection(ours, codec)


def _protocol() -> Any:
    from wsproto.connection import SERVER, Connection

    return Connection(SERVER)._proto


def _is_a(found: object, module: str, name: str) -> bool:
    return type(found) is getattr(importlib.import_module(module), name)


def _arguments(name: str) -> set[str]:
    import torch

    return {it.name for it in getattr(torch.ops.aten, name).default._schema.arguments}


def _moonshine() -> bool:
    api = pytest.importorskip("moonshine_voice.moonshine_api")
    return hasattr(api._MoonshineLib().lib, "moonshine_transcribe_without_streaming")


USED: Final[Mapping[tuple[str, str], Private]] = MappingProxyType(
    {
        ("runtime/webrtc/call.py", "_retransmit"): Private(
            "packets sent again at the client's wish: one asks for thousands, and none is of use",
            lambda: hasattr(importlib.import_module("aiortc").RTCRtpSender, "_retransmit"),
        ),
        ("runtime/webrtc/call.py", "_receive_data_chunk"): Private(
            "the fragments of a message, of which the library keeps any number",
            lambda: hasattr(
                importlib.import_module("aiortc").RTCSctpTransport, "_receive_data_chunk"
            ),
        ),
        ("runtime/webrtc/call.py", "_handle_rtp_packet"): Private(
            "the packets of a call: the receiver's own buffer drops five for each that is lost",
            lambda: hasattr(importlib.import_module("aiortc").RTCRtpReceiver, "_handle_rtp_packet"),
        ),
        ("runtime/net/websocket.py", "_wsproto"): Private(
            "the codec of a connection, to give it our decoder; trio-websocket makes it itself",
            lambda: _is_a(_websocket()._wsproto, "wsproto", "WSConnection"),
        ),
        ("runtime/net/websocket.py", "_proto"): Private(
            "wsproto takes no decoder of a user's; this is where a connection has its own",
            lambda: _is_a(_protocol(), "wsproto.frame_protocol", "FrameProtocol"),
        ),
        ("runtime/net/websocket.py", "_frame_decoder"): Private(
            "its mask takes 1.9 ms of the event loop for 1 MiB, ours 0.04; and one emoji makes a"
            " message take four times its size",
            lambda: _is_a(_protocol()._frame_decoder, "wsproto.frame_protocol", "FrameDecoder"),
        ),
        ("runtime/model/backends/moonshine.py", "_MoonshineLib"): Private(
            "its library; the public call makes an object of each sample, and the event loop waits",
            _moonshine,
        ),
        ("runtime/model/backends/minicpmo/attention.py", "_flash_attention_forward"): Private(
            "torch.nn.attention.varlen has the lengths in place only since torch 2.12",
            lambda: {"seqused_k", "window_size_left"} <= _arguments("_flash_attention_forward"),
        ),
        ("runtime/model/backends/minicpmo/vision.py", "_addmm_activation"): Private(
            "a linear layer and its GELU in one kernel; there is no public one",
            lambda: "use_gelu" in _arguments("_addmm_activation"),
        ),
    }
)
"""By file and name. A new row needs a reason that no public name serves; there may be few."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def sources() -> dict[str, list[ast.AST]]:
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {str(path.relative_to(ROOT)): nodes_of(path.read_text("utf-8")) for path in files}


def defined_in(nodes: Iterable[ast.AST]) -> set[str]:
    """The private names that a source gives to its own functions, classes, values and fields."""
    found = set[str]()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if is_private(name)}


def is_own(node: ast.expr) -> bool:
    """Whether an attribute's object is the method's own."""
    match node:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


def private_uses(nodes: Sequence[ast.AST], ours: set[str], here: set[str]) -> Iterator[str]:
    """The private names of libraries that a source uses; `ours` are of any source, `here` of it."""
    library = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
        if node.module.partition(".")[0] not in PACKAGES
    }
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module), level=0, names=names):
                if module.partition(".")[0] not in PACKAGES:
                    parts = [*module.split("."), *(alias.name for alias in names)]
                    yield from (part for part in parts if is_private(part))
            case ast.Import(names=names):
                parts = [part for alias in names for part in alias.name.split(".")]
                yield from (part for part in parts if is_private(part))
            case ast.Attribute(value=value, attr=name) if is_private(name):
                known = ours if is_own(value) else here
                if name not in known and not {name, ast.unparse(node)} & DOCUMENTED:
                    yield name
            case ast.ClassDef(bases=bases, body=body):
                yield from overridden(bases, body, library)


def overridden(
    bases: list[ast.expr], body: list[ast.stmt], library: Mapping[str, tuple[str, str]]
) -> Iterator[str]:
    """The private methods of a class that replace those of a library's class."""
    for base in bases:
        if isinstance(base, ast.Name) and base.id in library:
            module, name = library[base.id]
            theirs = getattr(importlib.import_module(module), name)
        elif isinstance(base, ast.Attribute):
            try:
                module, _, name = ast.unparse(base).rpartition(".")
                theirs = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                continue
        else:
            continue
        methods = (it for it in body if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef))
        names = (it.name for it in methods if is_private(it.name))
        yield from (name for name in names if hasattr(theirs, name))


def test_each_private_name_of_a_library_has_a_reason() -> None:
    """An update of a library breaks the server in a place that nobody looks at."""
    found = sources()
    defined = {path: defined_in(nodes) for path, nodes in found.items()}
    ours = set[str]().union(*defined.values())
    uses = Counter(
        (path, name)
        for path, nodes in found.items()
        for name in private_uses(nodes, ours, defined[path])
    )
    assert set(uses) == set(USED), "a private name of a library: USED says why, or a public one"
    assert uses.total() <= USES_MAX


@pytest.mark.parametrize("used", USED, ids=str)
def test_the_library_still_has_it(used: tuple[str, str]) -> None:
    """The name is gone, and only a slow or a large message shows it."""
    assert USED[used].is_there()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from lib._impl import name", "_impl"),
        ("from lib import _name", "_name"),
        ("import lib._impl", "_impl"),
        ("import lib\nlib.thing._state = 1", "_state"),
        ("class A:\n    def f(self): self._loop()", "_loop"),
        ("import trio\nclass A(trio.SSLStream):\n    def _retry(self): pass", "_retry"),
        ("from trio import SSLStream\nclass A(SSLStream):\n    def _retry(self): pass", "_retry"),
    ],
)
def test_each_way_to_use_one_is_found(source: str, found: str) -> None:
    """A private name is used in a way that the search does not know."""
    assert list(private_uses(nodes_of(source), set(), defined_in(nodes_of(source)))) == [found]


def test_names_of_our_own_are_none() -> None:
    """The table would have to list our own methods."""
    source = (
        "class A:\n    def _f(self): self._x = 1\ndef g(a): a._f(); return a._x, a._replace(b=1)"
    )
    assert list(private_uses(nodes_of(source), {"_f", "_x"}, defined_in(nodes_of(source)))) == []
