"""The recent tier: segments of records, where events lie in them, and the tail that a handle reads."""
