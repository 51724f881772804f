"""Antiphon: reads long documents in parallel, and reasons on what was found."""

from antiphon.api import Engine, ask, ask_async
from antiphon.assembly import EngineOptions
from antiphon.document import Document
from antiphon.methods.options import ParSerOptions
from antiphon.methods.parser import ParSer
from antiphon.results import Answer, Evidence

__all__ = ["Answer", "Document", "Engine", "EngineOptions", "Evidence", "ParSer", "ParSerOptions", "ask", "ask_async"]
