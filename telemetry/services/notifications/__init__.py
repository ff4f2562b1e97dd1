"""What leaves the house: channels, what they delivered, what they still owe, and the heartbeat."""
