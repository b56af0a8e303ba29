"""The workload to train, and one live training of it under a plan."""
