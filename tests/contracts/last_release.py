"""The newest migrations of the last release, whose code goes on for a while on a database that is newer."""

LAST_RELEASE = {"controlplane": "0016_event_places", "telemetry": "0003_reading_first_tokens"}  # 0.1.0
