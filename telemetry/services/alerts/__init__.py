"""Rules, alerts and their life: judged, explained, taken, silenced, told again."""
