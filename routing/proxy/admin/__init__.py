"""The admin port: configuration in, state and figures out."""
