"""PostgreSQL as a server that may go away, or say nothing: a Django backend that waits for it only so long."""
