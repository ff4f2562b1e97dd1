"""Sockets of a process: listened to beside others, spoken to over TLS, bound to the loopback or not."""
