"""A future release: an app whose migrations alter existing tables while this release runs."""
