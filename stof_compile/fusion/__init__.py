"""Operator fusion: chains of a graph, their schemes, which segments may be fused."""
