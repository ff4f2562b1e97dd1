"""The admin port, and the router's calls to the control plane."""
