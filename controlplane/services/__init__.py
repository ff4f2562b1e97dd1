"""Services: the only functions that write rows. Each makes one change, atomically, and records it as an event."""
