"""A joining replica prefills the openings that it will own before it takes traffic (README.md)."""
