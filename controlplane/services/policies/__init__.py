"""Services for policies: drafts, revisions, their settings, and rollouts."""
