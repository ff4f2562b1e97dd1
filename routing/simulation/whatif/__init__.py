"""Replay a trace over a modelled fleet, with the router's own strategies deciding."""
