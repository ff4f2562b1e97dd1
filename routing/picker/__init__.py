"""The endpoint picker: chooses replicas for an Envoy that carries the bytes."""
