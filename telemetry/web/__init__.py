"""Pages that show what did happen. Every figure comes from ``telemetry.services``; nothing is computed here."""
