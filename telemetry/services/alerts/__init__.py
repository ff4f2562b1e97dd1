"""Services on alerts, alert rules, silences, explanations and previews."""
