"""The planner: a pure function from what was measured to the plan to probe next."""
