"""Views of telemetry's pages."""
