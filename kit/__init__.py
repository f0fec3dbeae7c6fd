"""Reproducible-environment kit for vLLM experiments."""

__version__ = "0.1.0"
