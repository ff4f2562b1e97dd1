"""What the release after this one may change: an app whose migrations alter tables of ours while this release runs."""
