"""One model of a vLLM engine, driven in virtual time (replays) or in real time (the stand-in replica)."""
