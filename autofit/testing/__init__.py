"""What a third party tests a strategy or a planner with."""
