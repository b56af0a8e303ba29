"""What is the user's is put back as it was: live objects, the process, and a Ctrl-C that came."""
