"""Reading methods: controllers that decide who is asked what. Each is plain async code over an engine and a corpus."""

from antiphon.methods.options import ParSerOptions
from antiphon.methods.parser import ParSer
from antiphon.methods.prompts import ParSerPrompts

__all__ = ["ParSer", "ParSerOptions", "ParSerPrompts"]
