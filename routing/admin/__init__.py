"""The admin port, and the calls from the router to the control plane."""
