"""The search: probes plus a planner."""
