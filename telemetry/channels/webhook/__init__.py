"""The generic webhook: README.md."""
