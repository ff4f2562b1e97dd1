"""Canary analysis: compares a canary with the active revision, and reports the verdict to its rollout."""
