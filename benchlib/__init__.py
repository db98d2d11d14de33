"""benchlib measures speculative decoding of hybrid language models, and proves its numbers."""

__version__ = "0.1.0"
