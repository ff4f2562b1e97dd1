"""Scrapes the metrics of replicas and routers, and collects routers' decisions."""
