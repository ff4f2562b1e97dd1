"""Pages of the control plane: each view parses a request, calls one service and renders a template."""
