"""The report: a pure view of what a search recorded."""
