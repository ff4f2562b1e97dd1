"""Load balancing: which replica gets a request. Pure: no I/O, no event loop, only clocks that are passed in."""
