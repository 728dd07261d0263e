"""Chat in the SDK: a question, and its answer as it comes.

    answer = await session.ask("What is in the picture?")
    async for piece in answer:                 # Delta, Delta ... Response
        print(piece.text if isinstance(piece, Delta) else "")

A server keeps nothing between turns: each question carries the whole conversation. Read an answer
to its end before the next question. A refused question raises `ReportedError`, and the session goes
on. `cancel`, from another task, ends an answer with a `Response` whose reason is `interrupted`;
`close` ends the session with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import orjson

from protocol.values import messages as ms
from protocol.values.errors import ADMISSION_ERRORS
from protocol.values.model import ChatConfig, Role, Tool, ToolCall, ToolChoice, ToolResult
from protocol.values.requests import Ask, ChatMessage, Part, SpeechRequest, TextPart

from . import errors
from .duplex import close_politely
from .session import ClientSession

Question = str | ChatMessage | Sequence[ChatMessage]
"""The user's words, or the conversation that ends with them."""

_ALL_DEFAULTS = ChatConfig()


def message(role: Role, *parts: str | Part) -> ChatMessage:
    """Make a message of words and media (`ImagePart`, `AudioPart`, `VideoPart`), in order."""
    content = tuple(TextPart(text=part) if isinstance(part, str) else part for part in parts)
    return ChatMessage(role=role, content=content)


def tool(name: str, description: str = "", parameters: Mapping[str, object] | None = None) -> Tool:
    """Make a tool; `parameters` is a JSON Schema. `TypeError` if it is not JSON."""
    schema = "" if parameters is None else orjson.dumps(parameters).decode()
    return Tool(name=name, description=description, parameters=schema)


def called(response: ms.Response) -> ChatMessage:
    """Make the message of an answer that calls tools, for the next question's conversation."""
    text = (TextPart(text=response.text),) if response.text else ()
    return ChatMessage(role="assistant", content=(*text, *response.tool_calls))


def returned(call: ToolCall, output: str) -> ChatMessage:
    """Make the message of what a tool returned."""
    return ChatMessage(role="tool", content=(ToolResult(call_id=call.id, output=output),))


class ChatSession:
    """An open chat; `antiphon.connect` makes and closes it.

    `created` is the server's `session.created`; None in `legacy-chat`. `raw` is the session below.
    """

    def __init__(
        self,
        raw: ClientSession,
        *,
        created: ms.Created | None,
        on_queue: Callable[[ms.QueuePlace], object] | None = None,
        record: bool = True,
    ) -> None:
        self.raw = raw
        self.created = created
        self._on_queue = on_queue
        self._record = record or created is not None  # else the question says so (004)
        self._answer: Answer | None = None

    async def ask(
        self,
        question: Question,
        *,
        stream: bool = True,
        speech: SpeechRequest | bool = False,
        config: ChatConfig = _ALL_DEFAULTS,
        max_slice_nums: int | None = None,
        use_image_id: bool = True,
        omni: bool = False,
        thinking: bool = False,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = "auto",
        input_id: str | None = None,
    ) -> Answer:
        """Ask, and return the answer, to be iterated or `finish`ed.

        Args:
            question: the user's words, or the whole conversation.
            stream: the answer comes as it is made; else only its `Response`.
            speech: whether and how it is spoken.
            max_slice_nums: most slices of a picture, 1-9; None takes the model's own.
            use_image_id: pictures are numbered, where there are several.
            omni: sound and pictures of a message belong together (004, omni_mode).
            thinking: the model may think aloud before it answers.
            tools: what the model may call; its calls are in `Response.tool_calls`. Run them, and
                ask again with `called` and, for each, `returned` behind the conversation.
            tool_choice: `none` offers no tools.
            input_id: a name for this turn, where the dialect has a field for it.

        Raises:
            LocalProtocolError: the answer before is not over, or the dialect cannot ask this.
            SessionClosedError: the session is over.
        """
        if self._answer is not None and not self._answer.is_over:
            raise errors.LocalProtocolError(
                "a question during the answer to another: read that answer to its end first"
            )
        if isinstance(speech, bool):
            speech_request = SpeechRequest() if speech else None
        else:
            speech_request = speech
        with errors.as_client_errors():
            messages = _conversation(question)
        ask = Ask(
            messages=messages,
            streaming=stream,
            config=config,
            speech=speech_request,
            max_slice_nums=max_slice_nums,
            use_image_id=use_image_id,
            omni=omni,
            thinking=thinking,
            tools=tuple(tools),
            tool_choice=tool_choice,
            record=self._record,
            input_id=input_id,
        )
        try:
            await self.raw.ask(ask)
        except errors.SessionClosedError:
            while True:
                await self._receive()  # the last messages end with the error that says why
        self._answer = Answer(self._receive)
        return self._answer

    async def answer(
        self,
        question: Question,
        *,
        speech: SpeechRequest | bool = False,
        config: ChatConfig = _ALL_DEFAULTS,
        tools: Sequence[Tool] = (),
    ) -> ms.Response:
        """Ask and wait for the whole answer; arguments and errors as `ask`, `Answer.finish`."""
        answer = await self.ask(question, stream=False, speech=speech, config=config, tools=tools)
        return await answer.finish()

    async def cancel(self) -> None:
        """Ask for the end of the answer that is under way; its `Response` is still to be read.

        Raises:
            LocalProtocolError: the dialect has no such message (`legacy-chat`).
            SessionClosedError: the session is over.
        """
        if self._answer is not None and not self._answer.is_over:
            await self.raw.cancel()

    async def close(self, reason: str | None = None) -> None:
        """Ask for the session's end; an answer in progress is cut.

        The reason has at most 64 characters, in some dialects.

        Raises:
            LocalProtocolError: it was asked for before, or the dialect has no close.
            SessionClosedError: the session is over.
        """
        await self.raw.close(reason)

    async def leave(self) -> None:
        """Ask for the session's end, if it is open; `antiphon.connect` calls it."""
        await close_politely(self.raw)

    async def _receive(self) -> ms.ServerMessage:
        while True:
            message = await self.raw.receive_more()
            if not isinstance(message, ms.Queued | ms.QueueUpdate):
                return message
            if self._on_queue is not None:
                self._on_queue(message.place)


class Answer:
    """The answer to one question: iterate it for `Delta`s and at last the `Response`.

    `response` is `None` before the end; only `legacy-chat` sets `prefilled`.
    """

    def __init__(self, receive: Callable[[], Awaitable[ms.ServerMessage]]) -> None:
        self._receive = receive
        self.response: ms.Response | None = None
        self.prefilled: ms.Prefilled | None = None
        self.is_over = False

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> ms.Delta | ms.Response:
        while not self.is_over:
            message = await self._receive()
            match message:
                case ms.Delta():
                    return message
                case ms.Response():
                    self.response, self.is_over = message, True
                    return message
                case ms.Prefilled():
                    self.prefilled = message
                case ms.ErrorReport() if message.code not in ADMISSION_ERRORS:
                    self.is_over = True
                    raise errors.ReportedError(message)
        raise StopAsyncIteration

    async def finish(self) -> ms.Response:
        """Read to the end; the response of a streamed answer has no `pcm` of its deltas.

        Raises:
            ReportedError: the server refused the question, or failed to answer.
            SessionRefusedError: it has no place for it.
            SessionClosedError: the session is over.
            RemoteProtocolError: the server broke the protocol.
        """
        async for _ in self:
            pass
        if self.response is None:
            raise errors.LocalProtocolError("the answer has failed, as was reported before")
        return self.response


def _conversation(question: Question) -> tuple[ChatMessage, ...]:
    if isinstance(question, str):
        return (message("user", question),)
    return (question,) if isinstance(question, ChatMessage) else tuple(question)
