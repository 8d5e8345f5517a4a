"""Mask rules, their algebra and their block-sparse storage."""
