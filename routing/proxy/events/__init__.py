"""What happened here, kept on disk until the control plane has it."""
