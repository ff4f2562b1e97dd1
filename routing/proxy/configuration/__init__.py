"""The configuration: pushed or read, checked, kept on disk, and told to the control plane."""
