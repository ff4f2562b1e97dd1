"""A Slack-style incoming webhook: README.md."""
