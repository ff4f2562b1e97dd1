"""Pure parts of the router: no I/O, no event loop, nothing that waits."""
