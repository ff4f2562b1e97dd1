"""Several router processes behind one data port and one admin port."""
