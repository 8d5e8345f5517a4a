"""Reports about a dump: in the terminal, as a page, as the difference of two; never measures."""
