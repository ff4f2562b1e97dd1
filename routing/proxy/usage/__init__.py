"""What the body of an answer says of itself: its tokens, an error in a stream, that its engine gave it up."""
