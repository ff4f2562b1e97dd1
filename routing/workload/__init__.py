"""Traffic: traces, the seeded mix, and the player that sends either through a router."""
