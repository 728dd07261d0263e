"""A LiveKit agent whose model is an Antiphon server.

    pip install 'livekit-agents==1.8.9' 'livekit-plugins-openai==1.8.9'
    antiphon serve --model tiny
    python livekit_agent.py dev        # LIVEKIT_URL, LIVEKIT_API_KEY, LIVEKIT_API_SECRET are set

All who join a room of that LiveKit server then talk to the model. ANTIPHON_URL is the address of
the server (http://127.0.0.1:8006/v1), ANTIPHON_KEY a key, if it asks for one.
"""

from __future__ import annotations

import os

from livekit.agents import Agent, AgentServer, AgentSession, ChatMessage, JobContext, cli
from livekit.plugins.openai.realtime import GPTLiveModel

server = AgentServer()


def make_session() -> AgentSession:
    """Make a session: the model hears every second, and decides itself when it speaks."""
    return AgentSession(
        llm=GPTLiveModel(
            base_url=os.environ.get("ANTIPHON_URL", "http://127.0.0.1:8006/v1"),
            api_key=os.environ.get("ANTIPHON_KEY", "none"),
            model=os.environ.get("ANTIPHON_MODEL", "tiny"),
        )
    )


@server.rtc_session()
async def talk(context: JobContext) -> None:
    """Talk to a room."""
    session = make_session()

    @session.on("conversation_item_added")
    def show(event) -> None:
        if isinstance(event.item, ChatMessage):
            print(event.item.role, event.item.text_content, flush=True)

    await session.start(agent=Agent(instructions="Answer briefly."), room=context.room)


if __name__ == "__main__":
    cli.run_app(server)
