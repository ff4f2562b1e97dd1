"""HTTP/1.1 as a proxy needs it: messages of both sides, what of them goes on, and what is refused."""
