"""The built-in strategies; found by entry point, exactly as a third party's are."""
