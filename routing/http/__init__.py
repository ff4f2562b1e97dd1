"""HTTP messages, sockets, timers and tasks, and what responses say about token usage."""
