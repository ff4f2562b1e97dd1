"""Whether a revision on trial does harm: measured by the side of the one in force, and told to its rollout."""
