"""What happens to a control plane of real processes whose parts are killed, frozen and left away; one for all files."""
