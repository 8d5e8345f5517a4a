"""Finding attention in a graph, choosing a kernel for it and rewriting it."""
