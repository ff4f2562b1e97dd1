"""PagerDuty, by its Events API v2: README.md."""
