"""Views of the control plane's pages."""
