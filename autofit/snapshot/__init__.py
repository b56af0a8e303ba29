"""Remember live objects and the state of the process, and put both back."""
