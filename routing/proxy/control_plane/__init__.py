"""What the control plane is told: that this router is there, what it runs, and what happened, kept until it has it."""
