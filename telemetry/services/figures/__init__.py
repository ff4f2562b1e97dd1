"""What pages and the API show of readings, for whichever subject they ask."""
