"""The best plan of a report as a file that other software takes."""
