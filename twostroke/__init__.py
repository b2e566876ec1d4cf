"""Twostroke: LLM inference with separate prefill and decode, and a shared KV block store."""

__version__ = "0.1.0"
