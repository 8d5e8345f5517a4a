"""Captured stacks of layers, as fixtures of this folder."""

from captured_stacks import bert, capture, llama, stacks

__all__ = ["bert", "capture", "llama", "stacks"]
