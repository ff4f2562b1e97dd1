"""A model of a vLLM engine, driven in real time by the stand-in replica or in virtual time by tests."""
