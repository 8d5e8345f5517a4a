"""Search: which scheme a chain gets (stage 1), which configs its segments get (stage 2)."""
