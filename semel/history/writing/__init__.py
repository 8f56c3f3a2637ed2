"""Appends: durable before they are visible, in one order."""
