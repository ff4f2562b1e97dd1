"""Two database roles: an owner, which migrates, and the application's, which cannot touch what must not change."""
