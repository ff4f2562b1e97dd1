"""A router of several processes behind one data port and one admin port."""
