"""Services on channels, the delivery of notifications, and the heartbeat."""
