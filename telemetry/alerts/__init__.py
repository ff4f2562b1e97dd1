"""Alert rules: evaluation, alerts with their state machine, and notifications."""
