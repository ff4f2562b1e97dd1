"""The questions that pages and the API ask of readings, and the only writers of rules, channels and notifications."""
