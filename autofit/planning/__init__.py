"""The planner: a pure function from a search's specification and trials to the next plan."""
