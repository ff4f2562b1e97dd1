"""Tests on one control plane of real processes whose parts are killed, frozen and left down."""
