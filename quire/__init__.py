"""Quire: an LLM inference engine that reads like one gathering of pages."""

__version__ = "0.1.0"
