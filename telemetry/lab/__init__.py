"""What the captured decisions say about caches: pure replays of block hashes. No I/O, no clock."""
