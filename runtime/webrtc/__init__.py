"""Calls of browsers by WebRTC: a process between them and a gateway (`antiphon door`)."""
